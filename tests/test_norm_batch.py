"""Batch invariance and determinism: the bits of a row depend on its values, its width, its dtype and the
parameters, and on nothing else."""

import pytest
import torch
from norm_support import FWD, each, norm_inputs, past_l2_rows, whole_cols
from reference import same_bits

import fastln

MANY = 100_000
BATCHES = (1, 2, 3, 7, 64, 1000, MANY)
# Of one and of several rows a warp, and, in float16, of rows that 16-byte accesses do not divide.
NARROW = (1, 7, 8, 33, 64, 100, 128)

# Pieces of 16 bytes in a row: a warp, several, a block, a large block, a cluster, a wide one, a row in chunks.
WIDE_PIECES = (32, 64, 96, 128, 160, 300, 512, 640, 1024, 2048, 2560, 4096, 8192, 16384, 33000, 66000)


def results(sample):
    """Everything that is computed of a row: the output, mean and rstd."""
    return fastln.layer_norm(*sample), *FWD(*sample)


def assert_rows_have_the_same_bits(some, all_of_them, first):
    for part, whole in zip(some, all_of_them, strict=True):
        assert same_bits(part, whole[first : first + len(part)])


def assert_slices_have_the_bits_of_the_whole(sample, whole, batches):
    rows = len(sample.input)
    for batch in batches:
        for first in {0, rows // 3, rows - batch}:
            part = sample.input[first : first + batch]
            assert_rows_have_the_same_bits(results(sample.of(part)), whole, first)
            assert_rows_have_the_same_bits(results(sample.of(part.clone())), whole, first)


def random_rows(sample, rows):
    """The sample with so many random rows, made on the GPU because there are many."""
    x = torch.empty(rows, *sample.normalized_shape, dtype=torch.float32, device="cuda")
    x.normal_(0.5, 1.0, generator=torch.Generator("cuda").manual_seed(0))
    return sample.of(x.to(sample.input.dtype))


@each()
@pytest.mark.parametrize("cols", NARROW)
def test_a_row_has_the_same_bits_in_every_batch(dtype, cols, cuda):
    sample = random_rows(norm_inputs(dtype, cuda, (1, cols)), MANY)
    assert_slices_have_the_bits_of_the_whole(sample, results(sample), BATCHES)


@each()
@pytest.mark.parametrize("pieces", WIDE_PIECES)
def test_a_wide_row_has_the_same_bits_in_every_batch(dtype, pieces, cuda):
    """In those within the L2 and past it."""
    for cols in (whole_cols(dtype, pieces) - less for less in (0, 1, 2, 4)):
        rows = past_l2_rows(cols, dtype)
        sample = random_rows(norm_inputs(dtype, cuda, (1, cols)), rows)
        assert_slices_have_the_bits_of_the_whole(sample, results(sample), [n for n in (1, 2, 7, 64) if n < rows])


@each()
def test_a_row_has_the_same_bits_in_every_place(dtype, cuda):
    for cols in (1, 33, 64, 100, 768, 1025):
        sample = norm_inputs(dtype, cuda, (1, cols))
        expected = results(sample)
        for t, one in zip(results(sample.of(sample.input.repeat(3000, 1))), expected, strict=True):
            assert same_bits(t, one.expand_as(t))


@each()
def test_neighbours_change_no_bit_of_a_row(dtype, device):
    for cols in (7, 64, 300, 1025):
        sample = norm_inputs(dtype, device, (9, cols))
        expected = results(sample)
        others = norm_inputs(dtype, device, (9, cols), seed=1, scale=30.0).input
        others[4] = sample.input[4]
        assert all(same_bits(a[4], b[4]) for a, b in zip(results(sample.of(others)), expected, strict=True))


@each()
def test_case_38_a_row_does_not_depend_on_its_batch(dtype, device):
    sample = norm_inputs(dtype, device, (1, 6, 10, 100))
    assert same_bits(fastln.layer_norm(*sample)[:, :1], fastln.layer_norm(*sample.of(sample.input[:, :1])))
    for cols in (33, 1025, 8193):
        sample = norm_inputs(dtype, device, (70, cols))
        whole = results(sample)
        for first, end in ((0, 1), (69, 70), (3, 8), (1, 70)):
            assert_rows_have_the_same_bits(results(sample.of(sample.input[first:end])), whole, first)


@each(torch.float16, torch.float32)
def test_case_37_a_hundred_runs_give_the_same_bits(dtype, device):
    sample = norm_inputs(dtype, device, (1, 1024 if device.type == "cuda" else 8, 2048))
    first = fastln.layer_norm(*sample)
    assert all(same_bits(fastln.layer_norm(*sample), first) for _ in range(99))


@each()
def test_runs_of_every_plan_give_the_same_bits(dtype, cuda):
    for pieces in (1, 40, *WIDE_PIECES):
        for cols in (whole_cols(dtype, pieces), max(whole_cols(dtype, pieces) - 1, 1)):
            sample = norm_inputs(dtype, cuda, (2, cols))
            first = results(sample)
            for _ in range(5):
                assert all(same_bits(a, b) for a, b in zip(results(sample), first, strict=True))
