"""Faults of shape, size and layout that users of other LayerNorm kernels have met (FAULTS.md), each a test named after
the fault."""

import pytest
import torch
from reference import (
    assert_matches_float64,
    bits,
    call_out,
    in_padding,
    same_bits,
    sample_inputs,
    shares_storage,
)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 5), (0, 4096)])
def test_case_10_no_rows(kernel, shape, device):
    sample = sample_inputs(kernel, device, shape)
    for y in (kernel.op(*sample), kernel.op.scalar(sample.input, 1.5, 0.5), call_out(kernel, sample)):
        assert (y.shape, y.dtype, y.device) == (sample.input.shape, kernel.dtype, sample.input.device)
    assert (torch.ones(3, device=device) + 1).sum().item() == 6  # the device still works


@pytest.mark.parametrize("shape", [(3, 0), (0,), (2, 3, 0), (0, 0)])
def test_case_11_no_columns(kernel, shape, device):
    sample = sample_inputs(kernel, device, shape)
    for y in (kernel.op(*sample), kernel.op(sample.input), call_out(kernel, sample)):
        assert (y.shape, y.dtype, y.device) == (sample.input.shape, kernel.dtype, sample.input.device)
    assert (torch.ones(3, device=device) + 1).sum().item() == 6


def test_case_12_more_rows_than_a_grid_dimension_of_65535(kernel, device):
    tile = sample_inputs(kernel, device, (127, 64))
    expected = kernel.op(*tile)
    assert_matches_float64(kernel, expected, *tile)
    for rows in (65535, 65536, 65537) if device.type == "cuda" else (65537,):
        copies = rows // 127 + 1
        y = kernel.op(tile.input.repeat(copies, 1)[:rows], *tile[1:])
        assert same_bits(y, expected.repeat(copies, 1)[:rows])


def test_case_14_rows_are_all_leading_dimensions(kernel, device):
    sample = sample_inputs(kernel, device, (52, 7, 64))
    assert_matches_float64(kernel, kernel.op(*sample), *sample)


def test_case_17_a_row_past_48_kilobytes(kernel, device):
    for cols in (16384, 32768):
        sample = sample_inputs(kernel, device, (4, cols))
        assert_matches_float64(kernel, kernel.op(*sample), *sample)


@pytest.mark.kernels(accumulate="float32")
def test_case_18_columns_past_the_block(kernel, device):
    for cols in (70000, 262145):
        sample = sample_inputs(kernel, device, (3, cols))
        assert_matches_float64(kernel, kernel.op(*sample), *sample)


@pytest.mark.kernels(accumulate="float16")
def test_case_18_sums_past_the_largest_half_give_bias(kernel, device):
    """70000 squares of about 1 sum past 65504: the half-accumulating kernels' overflow once more."""
    sample = sample_inputs(kernel, device, (3, 70000))
    assert torch.equal(kernel.op(*sample), sample.bias.expand(3, 70000))


@pytest.mark.kernels(accumulate="float16")
def test_case_18_more_columns_than_half_can_count_are_right_where_sums_are_finite(kernel, device):
    """The number of columns passes 65504, the largest half, and no sum does."""
    sample = sample_inputs(kernel, device, (3, 70000))
    sample = sample._replace(input=sample.input / 4)
    assert_matches_float64(kernel, kernel.op(*sample), *sample)


def test_case_19_a_launch_that_never_ran_is_not_taken_for_one_that_did(kernel, device):
    for cols in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        sample = sample_inputs(kernel, device, (3, cols))
        assert_matches_float64(kernel, call_out(kernel, sample), *sample)


def test_case_23_column_stride(kernel, device):
    whole, weight, bias, _ = sample_inputs(kernel, device, (64, 320))
    x = whole[:, ::2]
    weight, bias = weight[::2], bias[::2]
    y = kernel.op(x, weight, bias)
    assert_matches_float64(kernel, y, x, weight, bias)
    assert same_bits(y, kernel.op(x.contiguous(), weight.contiguous(), bias.contiguous()))


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 64), (8, 128), (3, 33), (1, 7)])
def test_case_24_row_strided_heads(kernel, heads, head_dim, device):
    width = heads * head_dim
    qkv = sample_inputs(kernel, device, (10, 3 * width)).input
    weight, bias = sample_inputs(kernel, device, (head_dim,))[1:3]
    for part in qkv.split(width, dim=-1):
        x = part.view(10, heads, head_dim)
        y = kernel.op(x, weight, bias)
        assert_matches_float64(kernel, y, x, weight, bias)
        assert same_bits(y, kernel.op(x.contiguous(), weight, bias))


@pytest.mark.parametrize("shape", [(4, 4, 4, 4), (2, 3, 5, 8), (2, 64, 3, 33)])
def test_case_25_channels_last(kernel, shape, device):
    sample = sample_inputs(kernel, device, shape)
    x = sample.input.to(memory_format=torch.channels_last)
    y = kernel.op(x, *sample[1:])
    assert_matches_float64(kernel, y, *sample)
    assert same_bits(y, kernel.op(*sample))


@pytest.mark.parametrize("cols", [1024, 1000, 8])
def test_case_26_weight_and_bias_off_any_alignment(kernel, cols, device):
    sample = sample_inputs(kernel, device, (5, cols))
    flat = torch.cat([sample.weight, sample.bias, sample.weight])
    weight, bias = flat[1 : 1 + cols], flat[3 : 3 + cols]
    assert_matches_float64(kernel, kernel.op(sample.input, weight, bias), sample.input, weight, bias)
    weight, bias = flat.float()[1 : 1 + cols], flat.float()[3 : 3 + cols]
    assert_matches_float64(kernel, kernel.op(sample.input, weight, bias), sample.input, weight, bias)


def test_case_39_a_permuted_input_is_the_same_on_meta(kernel, device):
    shape, stride = (4, 576, 768), (442368, 1, 576)
    x = torch.empty_strided(shape, stride, dtype=kernel.dtype, device=device)
    x.copy_(sample_inputs(kernel, device, shape).input)
    weight, bias = sample_inputs(kernel, device, (768,))[1:3]
    y = kernel.op(x, weight, bias)
    on_meta = kernel.op(x.to("meta"), weight.to("meta"), bias.to("meta"))
    assert x.to("meta").stride() == stride
    assert (on_meta.shape, on_meta.stride(), on_meta.dtype) == (y.shape, y.stride(), y.dtype)
    assert_matches_float64(kernel, y[:1], x[:1], weight, bias)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (3, 33)])
def test_case_41_output_is_fresh_storage(kernel, shape, device):
    x, weight, bias, _ = sample_inputs(kernel, device, shape)
    before = x.clone()
    for y in (kernel.op(x), kernel.op(x, weight, bias), kernel.op.scalar(x, 1.0, 0.0), kernel.op(x.to("meta"))):
        assert not shares_storage(y, x)
        y.fill_(7.0)
    assert same_bits(x, before)


# The subset for compute-sanitizer, which is slow: fewer than 60 calls, each of few rows. Kernels that
# differ in accumulate type alone have the same accesses, so these five stand for all eight where noted.
REPRESENTATIVES = ("f32", "f32x4", "f16x2_f16", "f16x8_f16", "f16x8_pack_f32")


def check_every_byte(kernel, cols, device, *, offset=0):
    """Input rows and out lie in padding that must neither be read nor written."""
    sample = sample_inputs(kernel, "cpu", (3, cols))
    x, _ = in_padding(sample.input.to(device), offset, row_stride=cols + offset)
    out, storage = in_padding(torch.zeros_like(x), offset, padding=7.0)
    kernel.op.out(x, sample.weight.to(device), sample.bias.to(device), out=out)
    # The rest is done on the CPU, out of the sanitizer's sight.
    y, storage = out.cpu(), storage.cpu()
    assert_matches_float64(kernel, y, *sample)
    storage[offset : offset + y.numel()] = 7.0
    assert (bits(storage) == bits(torch.full_like(storage, 7.0))).all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("cols", [320, 321, 322])
def test_case_27_no_access_past_the_end(kernel, cols, device):
    check_every_byte(kernel, cols, device)


@pytest.mark.sanitizer
def test_case_27_no_access_past_the_end_off_alignment(kernel, device):
    check_every_byte(kernel, 33, device, offset=1)


@pytest.mark.sanitizer
@pytest.mark.kernels(name=REPRESENTATIVES)
@pytest.mark.parametrize("cols", [1, 7, 31, 1025, 8193])
def test_case_27_no_access_past_the_end_of_odd_rows(kernel, cols, device):
    check_every_byte(kernel, cols, device)
