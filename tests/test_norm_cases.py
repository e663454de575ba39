"""Forward faults that users of other LayerNorm kernels have met (FAULTS.md), each a test of fastln.layer_norm named
after the fault; those of layouts, streams, compilers and very large tensors stand with their kind elsewhere."""

import math

import pytest
import torch
from norm_support import (
    ELEMENTS,
    FWD,
    OP,
    assert_norm_matches_float64,
    each,
    norm_inputs,
    whole_cols,
)
from reference import layer_norm_float64, same_bits, shares_storage

import fastln

RANGES = pytest.mark.parametrize("cols", [1, 2, 8, 1000, 16384, 70001])


def plain(dtype, device, shape, **values):
    """A sample without weight and bias."""
    return norm_inputs(dtype, device, shape, **values).in_dtypes(None, None)


def device_still_works(device):
    return (torch.ones(3, device=device) + 1).sum().item() == 6


# ---------------------------------------------------------------------------------------- numerics


def test_case_01_one_pass_variance_of_a_large_mean_is_not_zero(device):
    sample = plain(torch.float32, device, (1024 if device.type == "cuda" else 16, 32768), scale=0.01, shift=100)
    y, _, rstd = FWD(*sample)
    reference = layer_norm_float64(sample.input)
    assert (y - reference.y).abs().max() < 5e-3
    variance, expected = (t.double() ** -2 - sample.eps for t in (rstd, reference.rstd))
    assert (variance / expected - 1).abs().max() < 1e-3


@each(torch.float32, torch.float64)
def test_case_02_large_mean_with_few_columns(dtype, device):
    sample = plain(dtype, device, (5, 4), shift=2000)
    assert (fastln.layer_norm(*sample).double() - layer_norm_float64(sample.input).y).abs().max() < 1e-2


def assert_constant_rows_are_exactly_bias(dtype, device, eps):
    for cols, values in ((10, (0.0,)), (1025, (0.0,)), (64, (0.0, 1.0, -3.0)), (1024, (0.0, 1.0, -3.0))):
        sample = norm_inputs(dtype, device, (1, cols), eps=eps)
        for value in values:
            y = fastln.layer_norm(*sample.of(torch.full_like(sample.input, value)))
            assert torch.equal(y[0], sample.bias)


@each()
def test_case_03_an_eps_below_half_does_not_become_zero(dtype, device):
    for eps in (1e-5, 1e-8, 1e-12):
        assert_constant_rows_are_exactly_bias(dtype, device, eps)


@each()
def test_case_03_nor_does_an_eps_below_float32(dtype, cuda):
    for eps in (1e-30, 1e-60):
        assert_constant_rows_are_exactly_bias(dtype, cuda, eps)


@each(torch.float16)
def test_case_04_squares_of_half_are_not_summed_in_half(dtype, device):
    for cols in (100, 4096):
        sample = plain(dtype, device, (8, cols), scale=8000, shift=0)
        y = fastln.layer_norm(*sample)
        assert y.isfinite().all()
        assert_norm_matches_float64(y, sample)


def aten_does_otherwise(dtypes, dtype, device):
    """On the CPU layer_norm is aten's kernel, and so are its limits (docs/performance.md lists them)."""
    if torch.device(device).type == "cpu" and dtype in dtypes:
        pytest.skip("aten's result on the CPU")


@each()
def test_case_05_a_single_column_is_exactly_bias(dtype, device):
    aten_does_otherwise((torch.float16, torch.bfloat16), dtype, device)
    largest = torch.finfo(dtype).max
    for value in (1e6, -1e6, 1e18, -1e18, 0.1, 0.0, torch.finfo(dtype).tiny):
        x = torch.full((4, 1), min(max(value, -largest), largest), dtype=dtype, device=device)
        weight, bias = (torch.tensor([v], dtype=dtype, device=device) for v in (2.0, 3.0))
        assert (fastln.layer_norm(x, [1], weight, bias) == 3.0).all()
        assert (fastln.layer_norm(x, [1]) == 0.0).all()


@each(torch.bfloat16, torch.float32, torch.float64)
@RANGES
def test_case_06_values_up_to_1e18_are_right(dtype, cols, device):
    aten_does_otherwise((torch.bfloat16, torch.float32), dtype, device)
    draw = torch.Generator().manual_seed(0)
    for largest in (1e10, 1e15, 1e18):
        x = (torch.rand(5, cols, generator=draw) * 2 - 1) * largest
        x[0, ::2], x[0, 1::2] = largest, -largest
        sample = norm_inputs(dtype, device, (5, cols)).of(x.to(dtype).to(device))
        assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


@each(torch.bfloat16, torch.float32)
@RANGES
def test_case_06_values_past_the_range_of_their_squares_are_bias(dtype, cols, device):
    """(x - mean)² is infinite in float32 and rstd 0, however long the row is."""
    aten_does_otherwise((torch.bfloat16, torch.float32), dtype, device)
    sample = norm_inputs(dtype, device, (5, cols), scale=1e30)
    y = fastln.layer_norm(*sample)
    assert torch.equal(y, sample.bias.expand(5, cols))


@each()
def test_case_07_a_tail_does_not_add_the_square_of_the_mean(dtype, device):
    for cols in (1536, 100, 769):
        sample = plain(dtype, device, (64, cols), shift=5)
        assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


@each()
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
def test_case_09_inf_row_leaves_neighbours_bitwise(dtype, bad, device):
    for cols in (4, 33, 256, 1025, 8193):
        sample = norm_inputs(dtype, device, (4, cols))
        expected = fastln.layer_norm(*sample)
        for row, place in ((0, cols // 2), (3, 0), (1, cols - 1)):
            spoiled = sample.input.clone()
            spoiled[row, place] = bad
            y = fastln.layer_norm(*sample.of(spoiled))
            assert y[row].isnan().all()
            others = [r for r in range(4) if r != row]
            assert same_bits(y[others], expected[others])


@each(torch.float16, torch.float32)
def test_case_28_only_one_of_weight_and_bias(dtype, device):
    x, parameter = (torch.tensor(v, dtype=dtype, device=device) for v in ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]))
    near = {"abs": 2e-4 if dtype == torch.float32 else 2**-6}
    only_bias, only_weight = fastln.layer_norm(x, [3], None, parameter), fastln.layer_norm(x, [3], parameter)
    assert only_bias.tolist() == pytest.approx([8.7753, 20.0, 31.2247], **near)
    assert only_weight.tolist() == pytest.approx([-12.2473, 0.0, 36.7420], **near)


@each(torch.float16, torch.bfloat16)
def test_case_33_a_float32_model_under_autocast(dtype, device):
    sample = norm_inputs(dtype, device, (5, 64)).in_dtypes(torch.float32, torch.float32)
    with torch.autocast(device.type, dtype=dtype):
        y = fastln.layer_norm(*sample)
    reference = layer_norm_float64(*sample[:1], *sample[2:])
    torch.testing.assert_close(y.double(), reference.y, rtol=2**-7, atol=2**-7)


@each(torch.float16, torch.bfloat16)
def test_case_36_halves_on_a_cpu(dtype):
    for cols in (1, 2, 33, 768, 4096):
        sample = norm_inputs(dtype, "cpu", (7, cols))
        assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


# ------------------------------------------------------------------------------------------ shapes


@each()
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 5), (0, 4096), (0, 131072)])
def test_case_10_no_rows(dtype, shape, device):
    sample = norm_inputs(dtype, device, shape)
    for y in (fastln.layer_norm(*sample), OP(*sample), FWD(*sample)[0]):
        assert (y.shape, y.dtype, y.device) == (sample.input.shape, dtype, sample.input.device)
    assert device_still_works(device)


@each()
@pytest.mark.parametrize("shape", [(3, 0), (0,), (2, 3, 0), (0, 0)])
def test_case_11_no_columns(dtype, shape, device):
    sample = norm_inputs(dtype, device, shape)
    for y in (fastln.layer_norm(*sample), OP(*sample), fastln.layer_norm(*sample.in_dtypes(None, None))):
        assert (y.shape, y.dtype, y.device) == (sample.input.shape, dtype, sample.input.device)
    assert fastln.layer_norm(torch.empty(3, 0, 4, dtype=dtype, device=device), [0, 4]).shape == (3, 0, 4)
    assert device_still_works(device)


@each(torch.float16, torch.float32)
def test_case_12_more_rows_than_a_grid_dimension_of_65535(dtype, device):
    tile = norm_inputs(dtype, device, (127, 64))
    expected = fastln.layer_norm(*tile)
    assert_norm_matches_float64(expected, tile)
    for rows in (65535, 65536, 65537) if device.type == "cuda" else (65537,):
        copies = rows // 127 + 1
        y = fastln.layer_norm(*tile.of(tile.input.repeat(copies, 1)[:rows]))
        assert same_bits(y, expected.repeat(copies, 1)[:rows])


def test_case_13_rows_of_two_dimensions_and_many_of_them(device):
    sample = norm_inputs(torch.float32, device, (70000 if device.type == "cuda" else 700, 6, 129), dims=2)
    assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


@each(torch.float16, torch.float32)
def test_case_14_rows_are_all_leading_dimensions(dtype, device):
    sample = norm_inputs(dtype, device, (52, 7, 64))
    assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


@each(torch.float32, torch.bfloat16)
def test_case_17_a_row_past_48_kilobytes(dtype, device):
    for cols in (16384, 16383, 32768, 32767):
        sample = norm_inputs(dtype, device, (4, cols))
        assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


@each()
def test_case_18_columns_past_the_block(dtype, device):
    for cols in (70000, 262145):
        sample = norm_inputs(dtype, device, (3, cols))
        assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


@each()
def test_case_19_a_launch_that_never_ran_is_not_taken_for_one_that_did(dtype, device):
    """The output's memory is one that NaNs were freed from, wherever torch's allocator gives it back."""
    for cols in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768, 131072):
        sample = norm_inputs(dtype, device, (3, cols))
        poison = [torch.full_like(sample.input, math.nan) for _ in range(2)]
        del poison
        assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


def test_case_20_the_last_block_of_rows(device):
    for rows in (1025, 1023, 127, 65):
        for cols in (32, 33, 8, 1):
            sample = norm_inputs(torch.float16, device, (rows, cols))
            assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


# ----------------------------------------------------------------------------------------- layouts


@each()
def test_case_23_column_stride(dtype, device):
    sample = norm_inputs(dtype, device, (64, 320))
    x, weight, bias = sample.input[:, ::2], sample.weight[::2], sample.bias[::2]
    y = fastln.layer_norm(x, [160], weight, bias)
    assert same_bits(y, fastln.layer_norm(x.contiguous(), [160], weight.contiguous(), bias.contiguous()))
    assert_norm_matches_float64(y, sample._replace(input=x, normalized_shape=[160], weight=weight, bias=bias))


@each()
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 64), (8, 128), (3, 33), (1, 7)])
def test_case_24_row_strided_heads(dtype, heads, head_dim, device):
    width = heads * head_dim
    qkv = norm_inputs(dtype, device, (10, 3 * width)).input
    sample = norm_inputs(dtype, device, (10, heads, head_dim))
    for part in qkv.split(width, dim=-1):
        x = part.view(10, heads, head_dim)
        y = fastln.layer_norm(*sample.of(x))
        assert_norm_matches_float64(y, sample.of(x))
        assert same_bits(y, fastln.layer_norm(*sample.of(x.contiguous())))


@each()
@pytest.mark.parametrize("shape", [(4, 4, 4, 4), (2, 3, 5, 8), (2, 64, 3, 33)])
def test_case_25_channels_last(dtype, shape, device):
    sample = norm_inputs(dtype, device, shape)
    y = fastln.layer_norm(*sample.of(sample.input.to(memory_format=torch.channels_last)))
    assert_norm_matches_float64(y, sample)
    assert same_bits(y, fastln.layer_norm(*sample))


@each()
def test_case_26_weight_and_bias_off_any_alignment(dtype, device):
    for cols in (1024, 1000, 8, whole_cols(dtype, 4096)):
        sample = norm_inputs(dtype, device, (5, cols))
        flat = torch.cat([sample.weight, sample.bias, sample.weight])
        shifted = sample._replace(weight=flat[1 : 1 + cols], bias=flat[3 : 3 + cols])
        for form in (shifted, shifted._replace(weight=flat.float()[1 : 1 + cols], bias=flat.float()[3 : 3 + cols])):
            assert_norm_matches_float64(fastln.layer_norm(*form), form)


@each(torch.float16, torch.float32)
def test_case_39_a_permuted_input_is_the_same_on_meta(dtype, device):
    shape, stride = (4, 576, 768), (442368, 1, 576)
    sample = norm_inputs(dtype, device, shape)
    x = torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(sample.input)
    y = fastln.layer_norm(*sample.of(x))
    on_meta = fastln.layer_norm(x.to("meta"), [768], sample.weight.to("meta"), sample.bias.to("meta"))
    assert (on_meta.shape, on_meta.stride(), on_meta.dtype) == (y.shape, y.stride(), y.dtype)
    assert_norm_matches_float64(y[:1], sample.of(x[:1]))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (3, 33)])
def test_case_41_output_is_fresh_storage(shape, device):
    for dtype in ELEMENTS:
        x, dims, weight, bias, _ = norm_inputs(dtype, device, shape)
        before = x.clone()
        for y in (fastln.layer_norm(x, dims), OP(x, dims, weight, bias), FWD(x, dims, None, None, 1e-5)[0]):
            assert not shares_storage(y, x)
            y.fill_(7.0)
        on_meta = x.to("meta")
        assert not shares_storage(fastln.layer_norm(on_meta, dims), on_meta)
        assert same_bits(x, before)
