"""Backward faults that users of other LayerNorm kernels have met (FAULTS.md), each a test named after the fault; those
of autograd, compilers and streams stand with their kind in the other files."""

import math

import pytest
import torch
import torch.nn.functional as F
from bwd_support import (
    ALL,
    BWD,
    TENSORS,
    all_same,
    assert_gradients_match_float64,
    backward,
    grads,
    leaves,
    stats,
    upstream,
)
from norm_support import FWD, each, need_gpu_memory, norm_inputs
from reference import same_bits

import fastln


def train(sample, dy=None):
    """The gradients of input, weight and bias by `backward()` of fastln.layer_norm, and the sample without grad."""
    sample = leaves(sample, *TENSORS)
    y = fastln.layer_norm(*sample)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return grads(sample), leaves(sample)


def check(sample, names=TENSORS):
    """Of a backward() with no pattern in the gradient of the output."""
    dy = upstream(sample)
    got, sample = train(sample, dy)
    assert_gradients_match_float64(got, dy, sample, names)


# ---------------------------------------------------------------------------------------- numerics


@each()
def test_case_05_a_single_column_has_no_gradient_of_input_and_weight(dtype, device):
    largest = torch.finfo(dtype).max
    for value in (1e6, -1e6, 1e18, 0.1, 0.0):
        for rows in (1, 5):
            x = torch.full((rows, 1), min(max(value, -largest), largest), dtype=dtype, device=device)
            weight, bias = (torch.tensor([v], dtype=dtype, device=device) for v in (2.0, 3.0))
            (dx, dweight, dbias), _ = train(
                norm_inputs(dtype, device, (rows, 1)).of(x)._replace(weight=weight, bias=bias)
            )
            assert torch.equal(dx, torch.zeros_like(x))
            assert (dweight.item(), dbias.item()) == (0, rows)


@each()
def test_case_08_dbias_is_not_summed_in_half(dtype, device):
    for rows in (1000, 4096):
        sample = norm_inputs(dtype, device, (rows, 48))
        (_, dweight, dbias), plain = train(sample)
        # bfloat16 has no number between 1000 and 1000; float16 holds both.
        assert (dbias == rows).all()
        assert_gradients_match_float64((None, dweight, None), torch.ones_like(plain.input), plain, ("weight",))


@each(torch.float16, torch.bfloat16)
def test_case_08_nor_are_many_small_parts_of_dweight(dtype, device):
    """x̂ is ±1: every row adds the same to dweight, until a sum in half counts no further."""
    x = torch.ones(4096, 64, dtype=dtype, device=device)
    x[:, ::2] = -1
    sample = norm_inputs(dtype, device, x.shape, eps=0.0).of(x)
    (_, dweight, _), _ = train(sample)
    assert (dweight.abs() == 4096).all()


@each()
@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
def test_case_09_a_bad_row_leaves_the_gradients_of_the_others(bad, dtype, device):
    for cols in (4, 33, 256, 1025):
        sample = norm_inputs(dtype, device, (4, cols))
        dy = upstream(sample)
        expected, _ = train(sample, dy)
        spoiled = sample.input.clone()
        spoiled[2, cols // 2] = bad
        (dx, *_), _ = train(sample.of(spoiled), dy)
        assert dx[2].isnan().any()
        assert same_bits(dx[[0, 1, 3]], expected[0][[0, 1, 3]])


@each()
def test_case_28_only_one_of_weight_and_bias(dtype, device):
    sample = norm_inputs(dtype, device, (9, 33))
    check(sample.in_dtypes(dtype, None), ("input", "weight"))
    check(sample.in_dtypes(None, dtype), ("input", "bias"))


@each(torch.float16, torch.bfloat16)
def test_case_36_halves_on_a_cpu(dtype):
    for cols in (1, 2, 33, 768, 4096):
        check(norm_inputs(dtype, "cpu", (67, cols)))


# ------------------------------------------------------------------------------------------ shapes


def works_still(device):
    return (torch.ones(3, device=device) + 1).sum().item() == 6


@each()
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 4096), (0, 131072)])
def test_case_10_no_rows(dtype, shape, device):
    (dx, dweight, dbias), _ = train(norm_inputs(dtype, device, shape))
    assert (dx.shape, dx.dtype) == (shape, dtype)
    for t in (dweight, dbias):
        assert torch.equal(t, torch.zeros(shape[-1], dtype=dtype, device=device))
    assert works_still(device)


@each()
@pytest.mark.parametrize("shape", [(3, 0), (0,), (2, 3, 0), (0, 0)])
def test_case_11_no_columns(dtype, shape, device):
    got, _ = train(norm_inputs(dtype, device, shape))
    assert [t.shape for t in got] == [shape, (0,), (0,)]
    assert all(t.dtype == dtype for t in got)
    assert works_still(device)


@each(torch.float16, torch.float32)
def test_case_12_more_rows_than_a_grid_dimension_of_65535(dtype, cuda):
    for rows in (65535, 65536, 65537):
        check(norm_inputs(dtype, cuda, (rows, 64)))


def test_case_13_rows_of_two_dimensions_and_many_of_them(device):
    check(norm_inputs(torch.float32, device, (70000 if device.type == "cuda" else 700, 6, 129), dims=2))


@each(torch.float16, torch.float32)
def test_case_14_rows_are_all_leading_dimensions(dtype, device):
    check(norm_inputs(dtype, device, (52, 7, 64)))


@each(torch.float32, torch.bfloat16)
def test_case_17_a_row_past_48_kilobytes(dtype, device):
    for cols in (16384, 16383, 32768, 32767):
        check(norm_inputs(dtype, device, (4, cols)))


@each()
def test_case_18_columns_past_the_block(dtype, device):
    for cols in (70000, 262145):
        check(norm_inputs(dtype, device, (3, cols)))


@each()
def test_case_19_a_launch_that_never_ran_is_not_taken_for_one_that_did(dtype, device):
    """The gradients' memory is one that NaNs were freed from, wherever torch's allocator gives it back."""
    for cols in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        for rows in (1, 3, 40) if device.type == "cuda" else (3,):
            sample = norm_inputs(dtype, device, (rows, cols))
            dy, statistics = upstream(sample), stats(sample)
            poison = [torch.full_like(t, math.nan) for t in (dy, dy, sample.weight, sample.weight, sample.weight)]
            del poison
            assert_gradients_match_float64(backward(dy, sample, ALL, statistics), dy, sample)


def test_case_20_the_last_block_of_rows(device):
    for rows in (1025, 1023, 127, 65):
        for cols in (32, 33, 8, 1) if device.type == "cuda" else (32,):
            check(norm_inputs(torch.float16, device, (rows, cols)))


@pytest.mark.large
@pytest.mark.parametrize(("rows", "cols"), [(131072, 16384), (175000, 12288), (4194320, 1024), (33_600_000, 64)])
def test_cases_15_and_16_rows_past_32_bit_offsets(rows, cols, cuda):
    """Zero but for 16 rows at three places, which have their gradient, and alone add to that of the parameters."""
    need_gpu_memory(3 * 2.1 * rows * cols / 1e9)
    few = norm_inputs(torch.float16, cuda, (16, cols))
    x, dy = (torch.zeros(rows, cols, dtype=torch.float16, device=cuda) for _ in range(2))
    places = [0, rows // 2, rows - 16]
    for place in places:
        x[place : place + 16], dy[place : place + 16] = few.input, upstream(few)
    sample = few.of(x)
    mean, rstd = stats(sample)
    dx, dweight, dbias = BWD(dy, x, [cols], mean, rstd, few.weight, few.bias, ALL)
    del x
    three = few.of(few.input.repeat(3, 1))
    three_dy = upstream(few).repeat(3, 1)
    of_places = torch.cat([dx[place : place + 16] for place in places])
    assert_gradients_match_float64((of_places, dweight, dbias), three_dy, three)
    assert not dx[16].any()
    assert not dx[rows - 17].any()


@pytest.mark.large
def test_case_21_enormous_rows(cuda):
    """2^28 columns: the reference takes them in pieces."""
    need_gpu_memory(20)
    cols = 2**28
    draw = torch.Generator(cuda).manual_seed(0)
    x = torch.empty(1, cols, dtype=torch.bfloat16, device=cuda).normal_(0.5, 1.0, generator=draw)
    dy = torch.empty_like(x).normal_(0.25, 1.0, generator=draw)
    _, mean, rstd = FWD(x, [cols], None, None, 1e-5)
    dx, dweight, dbias = BWD(dy, x, [cols], mean, rstd, None, None, ALL)
    pieces = [(a.double(), b.double()) for a, b in zip(x[0].split(2**24), dy[0].split(2**24), strict=True)]
    xhat = [((a - mean.double()) * rstd.double()).flatten() for a, _ in pieces]
    of_dy = sum(b.sum() for _, b in pieces) / cols
    of_both = sum((b * h).sum() for (_, b), h in zip(pieces, xhat, strict=True)) / cols
    for i, ((_, b), h) in enumerate(zip(pieces, xhat, strict=True)):
        place = slice(i * 2**24, (i + 1) * 2**24)
        expected = rstd.double().flatten() * (b - of_dy - h * of_both)
        torch.testing.assert_close(dx[0, place].double(), expected, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(dweight[place].double(), b * h, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dbias[place].double(), b, rtol=0, atol=0)


# ----------------------------------------------------------------------------------------- layouts


@each()
def test_case_22_a_gradient_of_stride_0(dtype, device):
    for shape in ((2, 1024, 256), (7, 33)):
        sample = leaves(norm_inputs(dtype, device, shape), *TENSORS)
        y = fastln.layer_norm(*sample)
        y.sum().backward()
        ones = torch.ones_like(y)
        assert all_same(grads(sample), backward(ones, leaves(sample)))
        assert_gradients_match_float64(grads(sample), ones, leaves(sample))


@each()
def test_case_23_column_stride(dtype, device):
    wide = norm_inputs(dtype, device, (64, 320)).input.requires_grad_()
    sample = leaves(norm_inputs(dtype, device, (64, 160)), "weight", "bias").of(wide[:, ::2])
    dy = upstream(sample)
    fastln.layer_norm(*sample).backward(dy)
    assert not wide.grad[:, 1::2].any()
    got = (wide.grad[:, ::2].contiguous(), sample.weight.grad, sample.bias.grad)
    assert_gradients_match_float64(got, dy, leaves(sample))


@each()
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 64), (8, 128), (3, 33), (1, 7)])
def test_case_24_row_strided_heads(dtype, heads, head_dim, device):
    width = heads * head_dim
    qkv = norm_inputs(dtype, device, (10, 3 * width)).input
    sample = norm_inputs(dtype, device, (10, heads, head_dim))
    for part in qkv.split(width, dim=-1):
        strided = sample.of(part.view(10, heads, head_dim))
        copied = sample.of(strided.input.contiguous())
        dy, statistics = upstream(sample), stats(copied)
        assert all_same(backward(dy, strided, ALL, statistics), backward(dy, copied, ALL, statistics))
        # and as the gradient of the output
        assert all_same(backward(strided.input, copied), backward(copied.input, copied))


@each()
@pytest.mark.parametrize("shape", [(4, 4, 4, 4), (2, 3, 5, 8), (2, 64, 3, 33)])
def test_case_25_channels_last(dtype, shape, device):
    sample = norm_inputs(dtype, device, shape)
    dy = upstream(sample)
    expected, plain = train(sample, dy)
    strided = sample.of(sample.input.to(memory_format=torch.channels_last))
    for got in (train(strided, dy)[0], train(strided, dy.to(memory_format=torch.channels_last))[0]):
        assert same_bits(got[0].contiguous(), expected[0])
        assert all_same(got[1:], expected[1:])
    assert_gradients_match_float64(expected, dy, plain)


@each()
def test_case_26_weight_and_bias_off_any_alignment(dtype, device):
    for cols in (1024, 1000, 8):
        sample = norm_inputs(dtype, device, (5, cols))
        flat = torch.cat([sample.weight, sample.bias, sample.weight])
        for form in (flat, flat.float() if dtype != torch.float64 else flat):
            shifted = sample._replace(weight=form[1 : 1 + cols], bias=form[3 : 3 + cols])
            dy = upstream(shifted)
            assert_gradients_match_float64(backward(dy, shifted), dy, shifted)


def test_case_30_a_convolution_works_after_a_norm_without_parameters(device):
    sample = leaves(norm_inputs(torch.float32, device, (2, 3, 8, 8)).in_dtypes(None, None), "input")
    fastln.layer_norm(*sample).sum().backward()
    kernel = torch.ones(1, 3, 3, 3, device=device)
    assert F.conv2d(sample.input.detach(), kernel).isfinite().all()
    assert works_still(device)


# --------------------------------------------------------------------------------------- determinism


@each(torch.float32, torch.bfloat16)
def test_case_37_a_hundred_runs_give_the_same_bits(dtype, device):
    for shape in ((1, 1024, 2048), (4096, 128), (3, 20000)) if device.type == "cuda" else ((1, 128, 256),):
        sample = norm_inputs(dtype, device, shape)
        dy = upstream(sample)
        expected, _ = train(sample, dy)
        for _ in range(100 if device.type == "cuda" else 5):
            assert all_same(train(sample, dy)[0], expected)
