"""The subset of fastln::layer_norm_bwd for compute-sanitizer, which is slow: fewer than 60 calls, each of few rows.

Under PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, so that an access past its end
is seen (27 in FAULTS.md).
"""

import pytest
import torch
from bwd_support import ALL, BWD, TENSORS, assert_gradients_match_float64, upstream
from norm_support import norm_inputs, to_the_last_byte
from reference import layer_norm_float64

pytestmark = pytest.mark.sanitizer


def check(dtype, cols, device, *, rows=3, offset=0, gap=0, param=None, mask=ALL):
    """One call; what is compared is compared on the CPU, out of the sanitizer's sight."""
    sample = norm_inputs(dtype, "cpu", (rows, cols)).in_dtypes(param or dtype, param or dtype)
    dy = upstream(sample)
    reference = layer_norm_float64(sample.input)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mean, rstd = (t.to(wide).to(device) for t in (reference.mean, reference.rstd))
    g, x = to_the_last_byte(dy, offset, gap, device), to_the_last_byte(sample.input, gap, offset, device)
    got = BWD(g, x, [cols], mean, rstd, sample.weight.to(device), sample.bias.to(device), mask)
    names = [name for name, wanted in zip(TENSORS, mask, strict=True) if wanted]
    assert_gradients_match_float64([None if t is None else t.cpu() for t in got], dy, sample, names)


@pytest.mark.parametrize("cols", [320, 321, 322])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_case_27_no_access_past_the_end(dtype, cols, device):
    check(dtype, cols, device)


@pytest.mark.parametrize("cols", [1, 4, 7, 9, 33, 100, 769, 772, 1025, 6004, 8193, 16401, 40001])
def test_case_27_no_access_past_the_end_of_odd_rows(cols, device):
    check(torch.bfloat16, cols, device)
    check(torch.float16, cols, device, offset=1, param=torch.float32)


@pytest.mark.parametrize("rows", [1, 2, 17, 133, 801, 2600])
def test_case_27_no_access_past_the_last_row(rows, device):
    check(torch.float16, 40, device, rows=rows)
    check(torch.float32, 33, device, rows=rows, offset=1)


@pytest.mark.parametrize(
    ("rows", "cols", "offset"),
    [(2053, 25, 0), (2055, 101, 3), (2051, 257, 0), (10_601, 401, 7), (2707, 1537, 1), (701, 8801, 0)],
)
def test_case_27_no_access_past_the_end_of_bundles_of_rows(rows, cols, offset, device):
    """Just enough rows for them on an H200, and no multiple of a bundle's."""
    check(torch.float16, cols, device, rows=rows, offset=offset)


def test_case_27_no_access_past_the_end_by_blocks_that_share_partial_sums(device):
    check(torch.float16, 8200, device, rows=385)


@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (7, 0), (0, 1), (3, 5), (0, 8)])
def test_case_27_no_access_outside_rows_of_any_place(offset, gap, device):
    check(torch.float16, 264, device, offset=offset, gap=gap)
    check(torch.float64, 33, device, offset=offset, gap=gap)


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("cols", [33, 768])
def test_case_27_no_access_to_gradients_not_asked_for(mask, cols, device):
    check(torch.float16, cols, device, mask=mask)


def test_case_27_no_access_past_the_end_of_misaligned_parameters(device):
    sample = norm_inputs(torch.float16, "cpu", (2, 768))
    dy = upstream(sample)
    reference = layer_norm_float64(sample.input)
    mean, rstd = (t.float().to(device) for t in (reference.mean, reference.rstd))
    weight, bias = (to_the_last_byte(t[None], 3, 0, device)[0] for t in (sample.weight, sample.bias))
    got = BWD(dy.to(device), sample.input.to(device), [768], mean, rstd, weight, bias, ALL)
    assert_gradients_match_float64([t.cpu() for t in got], dy, sample)
