"""Many rows of no whole vectors: bundles of them go through shared memory, and no bit depends on it."""

import pytest
import torch
from norm_support import FWD, each, norm_inputs, past_l2_rows
from reference import same_bits
from test_norm_batch import random_rows, results
from test_norm_layouts import misaligned

# Each number of threads that takes a row, from one to several warps, two rows a block and one; and pairs of words.
ODD = (17, 33, 49, 65, 101, 257, 399, 641, 769, 1025, 1537, 3001, 4097, 8193, 16385)
PAIRS = (68, 100, 140, 260, 300)
# Rows of a part whose rows norm_forward() or norm_walk() takes.
PARTS = 40


def many_rows(dtype, cols):
    """So many that bundles take them, and not a whole number of bundles."""
    return random_rows(norm_inputs(dtype, "cuda", (1, cols)), past_l2_rows(cols, dtype) | 1)


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("cols", ODD + PAIRS)
def test_many_rows_have_the_bits_of_few(dtype, cols, cuda):
    sample = many_rows(dtype, cols)
    for given in (sample, sample._replace(weight=None), sample._replace(bias=None)):
        parts = [results(given.of(x)) for x in given.input.chunk(PARTS)]
        for whole, *some in zip(results(given), *parts, strict=True):
            assert same_bits(whole, torch.cat(some))


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("cols", ODD + PAIRS)
@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (4, 0), (8, 0), (15, 0), (0, 1), (3, 16)])
def test_many_rows_of_any_place_give_the_same_bits(dtype, cols, offset, gap, cuda):
    sample = many_rows(dtype, cols)
    others = sample.of(misaligned(sample.input, offset, gap))
    for ours, theirs in zip(results(sample), results(others), strict=True):
        assert same_bits(ours, theirs)


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("cols", (264, 640, 1024, 4096))
def test_many_misaligned_rows_of_whole_vectors_give_the_same_bits(dtype, cols, cuda):
    sample = many_rows(dtype, cols)
    for offset in (1, 4, 7):
        others = sample.of(misaligned(sample.input, offset))
        for ours, theirs in zip(results(sample), results(others), strict=True):
            assert same_bits(ours, theirs)


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("cols", (257, 1025, 4097))
@pytest.mark.parametrize("stride", (0, 1, 5))
def test_many_rows_that_overlap_give_the_bits_of_their_copy(dtype, cols, stride, cuda):
    """Expanded rows, and windows of a longer row: more of them than the last end where the tensor does."""
    rows = past_l2_rows(cols, dtype)
    sample = norm_inputs(dtype, "cuda", (1, rows * stride + cols))
    x = sample.input.as_strided((rows, cols), (stride, 1))
    parameters = [t[:cols].contiguous() for t in (sample.weight, sample.bias)]
    expected = FWD(x.contiguous(), [cols], *parameters, 1e-5)
    for got, wanted in zip(FWD(x, [cols], *parameters, 1e-5), expected, strict=True):
        assert same_bits(got, wanted)


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("cols", (3, 5, 9, 25))
@pytest.mark.parametrize("more", (0, 1, 2))
def test_a_bundle_before_the_last_ends_near_the_end_of_the_tensor(dtype, cols, more, cuda):
    """So many rows that few are left for the last bundle, whose own end a copy of 16 bytes would overrun."""
    sample = norm_inputs(dtype, "cuda", (1 << 18 | more, cols))
    expected = results(sample)
    for offset in range(1, 8):
        got = results(sample.of(misaligned(sample.input, offset)))
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    first = [results(sample.of(x)) for x in sample.input.chunk(PARTS)]
    for whole, *some in zip(expected, *first, strict=True):
        assert same_bits(whole, torch.cat(some))
