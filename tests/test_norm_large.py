"""fastln.layer_norm of tensors whose offsets, rows or columns pass 32 bits."""

import math

import pytest
import torch
from norm_support import FWD, assert_norm_matches_float64, each, forced, need_gpu_memory, norm_inputs
from reference import same_bits

import fastln

pytestmark = pytest.mark.large

FEW = 16  # rows that are not zero, at each of three places


def mostly_zeros(rows, sample):
    """So many rows, zero but for those of the sample at three places, which are returned too."""
    x = torch.zeros(rows, *sample.normalized_shape, dtype=sample.input.dtype, device="cuda")
    places = [0, rows // 2, rows - FEW]
    for place in places:
        x[place : place + FEW] = sample.input
    return x, places


# In float16: of each plan, whole and shifted.
@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        pytest.param(131072, 16384, id="exactly_2_to_31"),
        pytest.param(175000, 12288, id="just_past_2_to_31"),
        pytest.param(4194320, 1024, id="past_2_to_32"),
        pytest.param(4194320, 1025, id="past_2_to_32_shifted"),
        pytest.param(33_600_000, 64, id="part_of_a_warp"),
        pytest.param(65_100_000, 33, id="part_of_a_warp_shifted"),
        pytest.param(67_000, 32768, id="large_block"),
        pytest.param(33_000, 65536, id="cluster"),
        pytest.param(17_000, 131072, id="cluster_of_large_blocks"),
        pytest.param(4_100, 524288, id="cluster_of_16_blocks"),
        pytest.param(31_000, 70001, id="chunks_shifted"),
        pytest.param(4_000, 540672, id="chunks"),
    ],
)
def test_cases_15_and_16_rows_past_32_bit_offsets(rows, cols, cuda):
    need_gpu_memory(2 * 2.1 * rows * cols / 1e9)
    sample = norm_inputs(torch.float16, cuda, (FEW, cols))
    x, places = mostly_zeros(rows, sample)
    y, mean, rstd = FWD(*sample.of(x))
    expected = FWD(*sample)
    assert_norm_matches_float64(expected[0], sample)
    for place in places:
        for t, few in zip((y, mean, rstd), expected, strict=True):
            assert same_bits(t[place : place + FEW], few)
    assert torch.equal(y[rows - FEW - 1], sample.bias)
    assert torch.equal(y[FEW], sample.bias)


@each(torch.float32, torch.float64)
def test_wider_items_past_32_bit_offsets(dtype, cuda):
    for cols in (1024, 1025):
        rows = 2**31 // cols + 100
        need_gpu_memory(2.1 * rows * cols * dtype.itemsize / 1e9)
        sample = norm_inputs(dtype, cuda, (FEW, cols))
        x, places = mostly_zeros(rows, sample)
        y, expected = fastln.layer_norm(*sample.of(x)), fastln.layer_norm(*sample)
        assert all(same_bits(y[place : place + FEW], expected) for place in places)
        del x, y


@pytest.mark.parametrize("cols", [1025, 768])
def test_rows_of_a_view_further_apart_than_32_bit_offsets(cols, cuda):
    stride = 2**31 + 8
    need_gpu_memory(2 * 2.3 * stride / 1e9)
    sample = norm_inputs(torch.float16, cuda, (2, cols))
    storage = torch.full((stride + cols,), math.nan, dtype=torch.float16, device=cuda)
    x = storage.as_strided((2, cols), (stride, 1))
    x.copy_(sample.input)
    assert same_bits(fastln.layer_norm(*sample.of(x)), fastln.layer_norm(*sample))


@pytest.mark.parametrize("plan", ["pieces=2,threads=64", "split"])
def test_more_rows_than_a_grid_has_blocks(plan, cuda):
    """A block a row: 2^31 - 1 rows fill a grid, the others take a second launch."""
    rows = 2**31 + 100
    need_gpu_memory(45)
    sample = norm_inputs(torch.float16, cuda, (FEW, 2))
    x, places = mostly_zeros(rows, sample)
    with forced(plan):
        y, expected = fastln.layer_norm(*sample.of(x)), fastln.layer_norm(*sample)
    assert all(same_bits(y[place : place + FEW], expected) for place in places)
    assert torch.equal(y[rows - FEW - 1], sample.bias)


def test_case_21_enormous_rows(cuda):
    """2^28 columns: the reference takes them in pieces."""
    need_gpu_memory(20)
    cols = 2**28
    x = torch.empty(1, cols, dtype=torch.bfloat16, device=cuda)
    x.normal_(0.5, 1.0, generator=torch.Generator(cuda).manual_seed(0))
    y, mean, rstd = FWD(x, [cols], None, None, 1e-5)
    parts = [part.double() for part in x[0].split(2**24)]
    true_mean = sum(part.sum() for part in parts) / cols
    true_rstd = (sum((part - true_mean).square().sum() for part in parts) / cols + 1e-5).rsqrt()
    assert (mean.item(), rstd.item()) == pytest.approx((true_mean.item(), true_rstd.item()), rel=1e-5)
    for part, got in zip(parts, y[0].split(2**24), strict=True):
        torch.testing.assert_close(got.double(), (part - true_mean) * true_rstd, rtol=2**-7, atol=1e-5)
