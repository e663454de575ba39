"""fastln::layer_norm_fwd: what layer_norm gives, and the rows' mean and rstd as in torch's native_layer_norm."""

import math

import pytest
import torch
from norm_support import ELEMENTS, FWD, assert_norm_matches_float64, each, norm_inputs, whole_cols
from reference import layer_norm_float64, same_bits

import fastln

WIDTHS = (1, 2, 7, 33, 256, 769, 1025, 4096)
WIDER = (8193, 20480, 32768, 32769, 70001, 131072, 262144)


def stats_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_stats_match_float64(sample, mean, rstd):
    """Within a few units of roundoff of the type that the rows are summed in."""
    x = sample.input.flatten(-len(sample.normalized_shape))
    unit = torch.finfo(ELEMENTS[x.dtype].acc_dtype).eps / 2
    reference = layer_norm_float64(x, eps=sample.eps)
    mean, rstd = (t.double().view(reference.mean.shape) for t in (mean, rstd))
    mean_off = (mean - reference.mean).abs() / (8 * unit * x.double().abs().mean(-1, keepdim=True))
    mean_in_sigmas = (reference.mean * reference.rstd).abs()
    rstd_off = (rstd / reference.rstd - 1).abs() / ((16 + 8 * mean_in_sigmas) * unit)
    # Written so that a NaN fails.
    assert (mean_off <= 1).all(), f"mean is off by {mean_off.max().item():.3g} times what is allowed"
    assert (rstd_off <= 1).all(), f"rstd is off by {rstd_off.max().item():.3g} times what is allowed"


@each()
@pytest.mark.parametrize("cols", WIDTHS)
def test_output_has_the_bits_of_layer_norm(dtype, cols, device):
    sample = norm_inputs(dtype, device, (5, cols))
    for form in (sample, sample.in_dtypes(None, None), sample.in_dtypes(torch.float32, dtype)):
        y = FWD(*form)[0]
        assert same_bits(y, fastln.layer_norm(*form))
        assert_norm_matches_float64(y, form)


@each()
def test_case_35_statistics_have_the_shape_strides_and_dtype_of_torchs_own(dtype, device):
    for shape, dims in (((5, 33), 1), ((33,), 1), ((2, 3, 8), 1), ((2, 3, 8), 2), ((2, 3, 8), 3), ((0, 8), 1)):
        sample = norm_inputs(dtype, device, shape, dims=dims)
        theirs = torch.native_layer_norm(*sample)
        for ours, their in zip(FWD(*sample)[1:], theirs[1:], strict=True):
            assert (ours.shape, ours.stride(), ours.device) == (their.shape, their.stride(), their.device)
            # On a CPU torch keeps the statistics of halves in half.
            assert ours.dtype == stats_dtype(dtype)
            assert device.type == "cpu" or ours.dtype == their.dtype


@each(torch.float32, torch.float64)
@pytest.mark.parametrize("cols", WIDTHS)
def test_mean_and_rstd_match_float64(dtype, cols, device):
    for eps, scale in ((1e-5, 1.0), (0.5, 1.0), (1e-5, 100.0)):
        sample = norm_inputs(dtype, device, (67, cols), eps=eps, scale=scale)
        assert_stats_match_float64(sample, *FWD(*sample)[1:])


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("cols", WIDTHS)
def test_mean_and_rstd_of_halves_are_not_rounded_to_half(dtype, cols, device):
    """As aten rounds them on a CPU, whichever parameters there are."""
    sample = norm_inputs(dtype, device, (67, cols))
    for form in (sample, sample.in_dtypes(None, None), sample.in_dtypes(None, dtype), sample.in_dtypes(dtype, None)):
        assert_stats_match_float64(form, *FWD(*form)[1:])


@each()
def test_mean_and_rstd_match_float64_in_a_row_of_several_blocks(dtype, cuda):
    for cols in WIDER:
        sample = norm_inputs(dtype, cuda, (3, cols))
        assert_stats_match_float64(sample, *FWD(*sample)[1:])


@each(torch.float16, torch.float32)
def test_statistics_do_not_depend_on_layout_or_parameters(dtype, cuda):
    for cols in (33, whole_cols(dtype, 96), 8193):
        sample = norm_inputs(dtype, cuda, (5, cols))
        expected = FWD(*sample)[1:]
        strided = torch.full((5, cols + 3), math.nan, dtype=dtype, device=cuda)[:, 1 : cols + 1]
        strided.copy_(sample.input)
        for other in (sample.of(strided), sample.in_dtypes(None, None), sample.in_dtypes(torch.float32, torch.float32)):
            assert all(same_bits(a, b) for a, b in zip(FWD(*other)[1:], expected, strict=True))


def test_statistics_of_no_columns_are_those_of_torch_on_every_device(device):
    for dtype in ELEMENTS:
        _, mean, rstd = FWD(torch.empty(3, 0, dtype=dtype, device=device), [0], None, None, 1e-5)
        theirs = torch.native_layer_norm(torch.empty(3, 0, dtype=dtype), [0], None, None, 1e-5)
        for ours, their in ((mean, theirs[1]), (rstd, theirs[2])):
            assert torch.equal(ours.cpu().isnan(), their.isnan())
            assert torch.equal(ours.cpu().nan_to_num(), their.nan_to_num().to(ours.dtype))


def test_statistics_of_no_rows_are_empty(device):
    y, mean, rstd = FWD(torch.empty(0, 8, device=device), [8], None, None, 1e-5)
    assert (y.shape, mean.shape, rstd.shape) == ((0, 8), (0, 1), (0, 1))


def test_results_share_no_storage(device):
    sample = norm_inputs(torch.float32, device, (5, 33))
    results = FWD(*sample)
    pointers = {t.data_ptr() for t in (*results, sample.input, sample.weight, sample.bias)}
    assert len(pointers) == 6
