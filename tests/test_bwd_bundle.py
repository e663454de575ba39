"""Many ragged rows: bundles of them go through shared memory, and no bit of dx depends on it."""

import pytest
import torch
from bwd_support import ALL, all_same, assert_gradients_match_float64, backward, stats, upstream
from norm_support import each, norm_inputs
from reference import in_padding, same_bits

# Rows and columns that bundles take, and no whole number of bundles: a part of a warp, a warp with one vector a thread
# and with two, blocks of two and of three.
SHAPES = [
    (4001, 9),
    (4003, 25),
    (3001, 67),
    (2501, 101),
    (2101, 257),
    (10_601, 401),
    (2707, 1537),
    (1801, 3001),
    (701, 8801),
]


def arguments(dtype, rows, cols):
    sample = norm_inputs(dtype, "cuda", (rows, cols))
    return upstream(sample), sample, stats(sample)


def part(sample, statistics, rows):
    return sample.of(sample.input[rows]), [t[rows] for t in statistics]


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_gradients_match_float64(dtype, rows, cols, cuda):
    for param in (dtype, torch.float32):
        sample = norm_inputs(dtype, "cuda", (rows, cols)).in_dtypes(param, param)
        dy = upstream(sample)
        assert_gradients_match_float64(backward(dy, sample), dy, sample)


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_dx_of_many_rows_has_the_bits_of_few(dtype, rows, cols, cuda):
    dy, sample, statistics = arguments(dtype, rows, cols)
    whole = backward(dy, sample, ALL, statistics)[0]
    some = []
    for first in range(0, rows, 300):  # as few as go another way
        chosen = slice(first, first + 300)
        few, of_few = part(sample, statistics, chosen)
        some.append(backward(dy[chosen], few, ALL, of_few)[0])
    assert same_bits(whole, torch.cat(some))


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_rows_of_any_place_give_the_same_bits(dtype, rows, cols, cuda):
    """Side by side at any address each gradient has the same bits; apart, where bundles are not for them, dx has."""
    dy, sample, statistics = arguments(dtype, rows, cols)
    expected = backward(dy, sample, ALL, statistics)
    for at_dy, at_x in ((1, 0), (0, 8), (15, 4), (3, 5)):
        x, g = in_padding(sample.input, at_x)[0], in_padding(dy, at_dy)[0]
        got = backward(g, sample.of(x), ALL, statistics)
        assert all_same(got, expected)
    apart = backward(dy, sample.of(in_padding(sample.input, 1, cols + 3)[0]), ALL, statistics)
    assert same_bits(apart[0], expected[0])


@each(torch.float16, torch.bfloat16)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_a_hundred_runs_give_the_same_bits(dtype, rows, cols, cuda):
    call = arguments(dtype, rows, cols)
    expected = backward(call[0], call[1], ALL, call[2])
    for _ in range(100):
        got = backward(call[0], call[1], ALL, call[2])
        assert all_same(got, expected)


@each(torch.float16)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_a_row_of_nan_changes_dx_of_no_other(dtype, rows, cols, cuda):
    """Neighbours lie in one buffer, and their last elements in one word."""
    dy, sample, statistics = arguments(dtype, rows, cols)
    expected = backward(dy, sample, ALL, statistics)[0]
    bad = [0, 7, rows // 2, rows - 1]
    x, g = sample.input.clone(), dy.clone()
    x[bad], g[bad] = float("nan"), float("inf")
    got = backward(g, sample.of(x), ALL, statistics)[0]
    others = torch.ones(rows, dtype=torch.bool)
    others[bad] = False
    assert same_bits(got[others], expected[others])
    assert got[bad].isnan().all()


@each(torch.float16)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_without_weight_or_gradients_of_the_parameters(dtype, rows, cols, cuda):
    dy, sample, statistics = arguments(dtype, rows, cols)
    expected = backward(dy, sample, ALL, statistics)
    assert same_bits(backward(dy, sample, (True, False, False), statistics)[0], expected[0])
    for mask in ((True, True, False), (True, False, True)):
        for got, wanted in zip(backward(dy, sample, mask, statistics), expected, strict=True):
            assert got is None or same_bits(got, wanted)
    bare = sample._replace(weight=None, bias=None)
    assert_gradients_match_float64(backward(dy, bare, ALL, statistics), dy, bare)
