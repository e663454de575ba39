"""fastln::layer_norm_bwd against float64 autograd of the formula."""

import itertools

import pytest
import torch
from bwd_support import ALL, BWD, MIXTURES, TENSORS, assert_gradients_match_float64, backward, stats, upstream
from norm_support import each, norm_inputs
from reference import COLS, same_bits

MASKS = list(itertools.product([False, True], repeat=3))


def check(sample, mask=ALL):
    dy = upstream(sample)
    names = [name for name, wanted in zip(TENSORS, mask, strict=True) if wanted]
    assert_gradients_match_float64(backward(dy, sample, mask), dy, sample, names)


@each()
@pytest.mark.parametrize("cols", COLS)
def test_matches_float64(dtype, cols, device):
    # 131 rows: a number that divides no block's.
    for rows in (1, 5, 131) if cols <= 1025 else (1, 7):
        check(norm_inputs(dtype, device, (rows, cols)))


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixed_dtypes_match_float64(mixture, device):
    x, weight, bias = MIXTURES[mixture]
    for cols in (1, 33, 769, 1024):
        check(norm_inputs(x, device, (67, cols)).in_dtypes(weight, bias))


@each()
@pytest.mark.parametrize("form", ["weight", "bias", "none"])
def test_absent_parameters_match_float64(form, dtype, device):
    """The gradient of an absent parameter comes in the dtype of the sums."""
    for cols in (1, 33, 769):
        sample = norm_inputs(dtype, device, (67, cols))
        check(sample.in_dtypes(dtype if form == "weight" else None, dtype if form == "bias" else None))


@each()
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((4, 6, 129), 2),
        ((2, 3, 4, 8), 3),
        ((3, 4, 5), 3),
        ((5, 1, 33), 2),
        ((5, 33, 1), 2),
        ((33,), 1),
        ((7, 16, 64), 2),
    ],
    ids=str,
)
def test_normalized_shape_of_several_dimensions(dtype, shape, dims, device):
    check(norm_inputs(dtype, device, shape, dims=dims))


@each()
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: "".join("01"[wanted] for wanted in mask))
def test_only_the_gradients_in_the_mask_are_there(mask, dtype, device):
    for rows, cols in ((67, 96), (5, 33)):
        check(norm_inputs(dtype, device, (rows, cols)), mask)


@each()
def test_eps_stands_in_rstd_alone(dtype, device):
    for eps in (1e-12, 1e-2, 100.0):
        check(norm_inputs(dtype, device, (5, 64), eps=eps))


@each(torch.float32, torch.float64)
@pytest.mark.parametrize("cols", [4, 257, 4096])
def test_a_mean_of_10000_sigma(dtype, cols, device):
    check(norm_inputs(dtype, device, (5, cols), shift=1e4))


@each()
def test_statistics_may_have_any_shape_and_stride_of_as_many_elements(dtype, device):
    sample = norm_inputs(dtype, device, (3, 5, 33))
    dy, (mean, rstd) = upstream(sample), stats(sample)
    expected = backward(dy, sample)
    both = torch.stack([mean.flatten(), rstd.flatten()], dim=-1)
    for m, r in ((mean[..., 0], rstd[..., 0]), (mean.flatten(), rstd.flatten()), both.unbind(-1)):
        got = BWD(dy, sample.input, [33], m, r, sample.weight, sample.bias, ALL)
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_arguments_are_left_as_they_were(device):
    for dtype in (torch.float16, torch.float32):
        sample = norm_inputs(dtype, device, (5, 33))
        tensors = [upstream(sample), sample.input, *stats(sample), sample.weight, sample.bias]
        before = [t.clone() for t in tensors]
        dy, x, mean, rstd, weight, bias = tensors
        results = BWD(dy, x, [33], mean, rstd, weight, bias, ALL)
        assert all(same_bits(a, b) for a, b in zip(tensors, before, strict=True))
        assert len({t.untyped_storage().data_ptr() for t in (*results, *tensors)}) == 9
