"""The subset of fastln.layer_norm for compute-sanitizer, which is slow: about a hundred calls, each of few rows.

Under PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, so that an access past its end
is seen (27 in FAULTS.md).
"""

import pytest
import torch
from norm_support import FWD, assert_norm_matches_float64, forced, norm_inputs, to_the_last_byte
from reference import same_bits

import fastln

pytestmark = pytest.mark.sanitizer


def check(dtype, cols, device, *, rows=3, offset=0, gap=0, param=None, plan=""):
    """One call; what is compared is compared on the CPU, out of the sanitizer's sight."""
    sample = norm_inputs(dtype, "cpu", (rows, cols)).in_dtypes(param or dtype, param or dtype)
    x = to_the_last_byte(sample.input, offset, gap, device)
    with forced(plan):
        y, mean, rstd = FWD(x, [cols], sample.weight.to(device), sample.bias.to(device), 1e-5)
    assert_norm_matches_float64(y.cpu(), sample)
    assert mean.cpu().isfinite().all()
    assert (rstd.cpu() > 0).all()


@pytest.mark.parametrize("cols", [320, 321, 322])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_case_27_no_access_past_the_end(dtype, cols, device):
    check(dtype, cols, device)


@pytest.mark.parametrize("cols", [1, 4, 7, 9, 33, 100, 769, 772, 1025, 8193])
def test_case_27_no_access_past_the_end_of_odd_rows(cols, device):
    check(torch.bfloat16, cols, device)
    check(torch.float16, cols, device, offset=1, param=torch.float32)


@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (7, 0), (0, 1), (3, 5), (0, 8)])
def test_case_27_no_access_outside_rows_of_any_place(offset, gap, device):
    check(torch.float16, 264, device, offset=offset, gap=gap)
    check(torch.float64, 33, device, offset=offset, gap=gap)


@pytest.mark.parametrize(("pieces", "rows"), [(16, 1), (32, 5), (64, 5), (96, 5), (128, 3), (160, 3)])
def test_case_27_no_access_past_the_end_of_full_rows_that_leave_groups_idle(pieces, rows, device):
    check(torch.float16, 8 * pieces, device, rows=rows)
    check(torch.bfloat16, 8 * pieces, device, rows=rows, gap=8, param=torch.float32)
    check(torch.float32, 4 * pieces, device, rows=rows)


@pytest.mark.parametrize(("threads", "pieces"), [(4, 2), (4, 3), (64, 2), (64, 3), (64, 4), (64, 5), (64, 8)])
def test_case_27_no_access_past_the_end_in_any_variant(pieces, threads, device):
    whole = pieces * threads * 8
    plan, rows = f"pieces={pieces},threads={threads}", 18 if threads == 4 else 2
    check(torch.float16, whole, device, rows=rows, plan=plan)
    check(torch.float16, whole, device, rows=rows, offset=3, plan=plan)
    for less in (2, 4):
        check(torch.float16, whole - less, device, rows=rows, plan=plan)
        check(torch.float16, whole - less, device, rows=rows, offset=5, plan=plan)
    check(torch.float16, whole - 5, device, rows=rows, offset=6, plan=plan)


@pytest.mark.parametrize(("cols", "rows"), [(100, 26_000), (770, 5_500), (4098, 1_100)])
def test_case_27_no_access_past_the_end_of_rows_that_groups_walk_over(cols, rows, device):
    """More than twice as many as stay resident on an H200, whose last come to an end in the midst of the groups."""
    check(torch.float16, cols, device, rows=rows)


@pytest.mark.parametrize(
    ("cols", "rows", "offset", "gap"),
    [
        (17, 82_003, 0, 0),
        (100, 35_001, 0, 0),
        (101, 10_301, 3, 0),
        (257, 5_201, 0, 0),
        (1025, 1_301, 7, 0),
        (4097, 1_325, 5, 2),
    ],
)
def test_case_27_no_access_past_the_end_of_bundles_of_rows(cols, rows, offset, gap, device):
    """Just enough rows for them on an H200, and no multiple of a bundle's."""
    check(torch.float16, cols, device, rows=rows, offset=offset, gap=gap)


@pytest.mark.no_racecheck
@pytest.mark.parametrize("cluster", [2, 4, 8, 16])
def test_case_27_no_access_past_the_end_in_a_cluster(cluster, device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("needs thread block clusters")
    check(torch.float16, 8 * 32 * 8 * cluster - 64, device, rows=2, plan=f"pieces=8,threads=32,cluster={cluster}")
    # With 132 multiprocessors each group of warps of each cluster has a row, and some have two.
    if cluster == 8:
        check(torch.float16, 8 * 64 * 8 * cluster - 8, device, rows=140, gap=8, plan="pieces=8,threads=64,cluster=8")


@pytest.mark.no_racecheck
def test_case_27_no_access_past_the_end_in_a_cluster_without_room_for_the_parameters(device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("needs thread block clusters")
    cols = 8 * 512 * 8 * 2 - 8
    check(torch.float16, cols, device, rows=2, param=torch.float32, plan="pieces=8,threads=512,cluster=2")


@pytest.mark.parametrize("cols", [7, 16384, 16401, 40001])
@pytest.mark.parametrize("offset", [0, 1])
def test_case_27_no_access_past_the_end_of_a_row_in_chunks(cols, offset, device):
    check(torch.float16, cols, device, rows=2, offset=offset, plan="split")


def test_case_27_no_access_past_the_end_of_misaligned_parameters(device):
    sample = norm_inputs(torch.float16, "cpu", (2, 768))
    weight, bias = (to_the_last_byte(t[None], 3, 0, device)[0] for t in (sample.weight, sample.bias))
    y = fastln.layer_norm(*sample._replace(input=sample.input.to(device), weight=weight, bias=bias))
    assert_norm_matches_float64(y.cpu(), sample)


@pytest.mark.no_racecheck
def test_case_27_no_access_outside_a_row_that_needs_an_aligned_copy(device):
    """65536 columns belong to a cluster, which rows off alignment cannot have."""
    sample = norm_inputs(torch.float16, "cpu", (2, 65536))
    x = to_the_last_byte(sample.input, 1, 0, device)
    weight, bias = sample.weight.to(device), sample.bias.to(device)
    aligned = fastln.layer_norm(sample.input.to(device), [65536], weight, bias)
    assert same_bits(fastln.layer_norm(x, [65536], weight, bias), aligned)
