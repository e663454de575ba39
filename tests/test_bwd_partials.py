"""dweight and dbias to the bit: of many rows, where each block sums its own rows, and two may share a partial sum; of
fewer, where blocks, or clusters of them, sum slices of columns."""

import itertools
import math

import pytest
import torch
from bwd_support import ALL, BWD
from norm_support import each
from reference import same_bits

# From 385 rows of 8192 to 16384 columns on, two blocks share; longer rows belong to clusters.
COLS = (8184, 8192, 8200, 12288, 16376, 16384, 16392)
MASKS = (ALL, (False, True, True), (True, True, False), (False, False, True))


def exact(rows, cols, dtype, device):
    """dy, x, the sizes, mean and rstd, whose every dy and x̂ is a small number other than 0; dweight and dbias, which
    float32 holds exactly, and each sum on the way to them."""
    draw = torch.Generator().manual_seed(cols)
    dy, centred = (torch.randint(-2, 2, (rows, cols), generator=draw).to(device).double() * 2 + 1 for _ in range(2))
    mean = torch.randint(-2, 3, (rows, 1), generator=draw).to(device).float()
    rstd = 2.0 ** torch.randint(-1, 2, (rows, 1), generator=draw).to(device)
    arguments = (dy.to(dtype), (centred + mean).to(dtype), [cols], mean, rstd)
    return arguments, ((dy * centred * rstd).sum(0), dy.sum(0))


def check(rows, cols, dtype, params, blocks, device):
    arguments, sums = exact(rows, cols, dtype, device)
    for param, mask in itertools.product(params, MASKS):
        parameter = torch.ones(cols, dtype=param, device=device)
        # As large as dx and as the partial sums, whose memory it is next.
        like_them = ((rows, cols, dtype), (blocks, cols, torch.float32))
        poison = [torch.full((r, c), math.nan, dtype=t, device=device) for r, c, t in like_them]
        del poison
        _, *got = BWD(*arguments, parameter, parameter, mask)
        for grad, expected, wanted in zip(got, sums, mask[1:], strict=True):
            assert (grad is not None) == wanted
            assert not wanted or same_bits(grad, expected.to(param)), (rows, cols, param, mask)


@each(torch.float16, torch.bfloat16)
def test_no_row_is_missing_from_sums_that_are_exact(dtype, device):
    on_gpu = device.type == "cuda"
    blocks = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 132
    # The second time one block alone has a row more than all others.
    all_rows = (385, (400 // blocks + 1) * blocks + 1) if on_gpu else (385,)
    for rows, cols in itertools.product(all_rows, COLS if on_gpu else (8200,)):
        check(rows, cols, dtype, (dtype, torch.float32), blocks, device)


@each(torch.float16, torch.float32)
@pytest.mark.parametrize("cols", [96, 100, 512, 768, 1000, 1025, 2048, 2560, 4096, 4097, 6144, 6600, 8192, 16384])
def test_no_row_is_missing_from_slices_of_columns(cols, dtype, device):
    """Rows that each width of a slice and each size of a cluster get, whole rounds of them and others."""
    wide = cols * dtype.itemsize > 14 * 1024
    for rows in (
        (1, 17, 64, 100) if device.type == "cpu" or wide else (1, 17, 64, 100, 200, 256, 333, 512, 777, 1024, 2047)
    ):
        check(rows, cols, dtype, (dtype,), 1, device)
