"""Rows that a cluster of blocks shares: blocks walk over many rows, several at once, and no bit depends on how."""

import pytest
import torch
from norm_support import FWD, assert_norm_matches_float64, each, forced, norm_inputs, whole_cols
from reference import in_padding, same_bits

import fastln

# One warp a block, two, and as many as a block can have; then with a last block that has little of the row, or nothing.
CLUSTERS = [
    ("pieces=8,threads=32,cluster=2", 512),
    ("pieces=8,threads=32,cluster=8", 2048),
    ("pieces=8,threads=64,cluster=4", 2048),
    ("pieces=8,threads=128,cluster=8", 8192),
    ("pieces=8,threads=512,cluster=2", 8192),
    ("pieces=8,threads=32,cluster=16", 4096),  # where the GPU takes so many blocks
    ("pieces=8,threads=512,cluster=16", 65536),
    ("pieces=8,threads=96,cluster=8", 5121),
    ("pieces=8,threads=64,cluster=8", 3),
]
BY_PLAN = pytest.mark.parametrize(("plan", "pieces"), CLUSTERS)


@pytest.fixture(autouse=True)
def clusters(cuda):
    if torch.cuda.get_device_capability(cuda)[0] < 9:
        pytest.skip("needs thread block clusters")


def many_rows(pieces):
    """More than the GPU holds at once, by the smallest cluster and the most groups of warps, where they are short."""
    return 2500 if pieces <= 2048 else 600 if pieces <= 8192 else 60


def results(sample):
    return fastln.layer_norm(*sample), *FWD(*sample)


@each()
@BY_PLAN
def test_every_row_of_many_has_the_bits_it_has_alone(dtype, plan, pieces, cuda):
    some = norm_inputs(dtype, cuda, (7, whole_cols(dtype, pieces)))
    rows = many_rows(pieces)
    order = torch.arange(rows, device=cuda) * 3 % 7  # neighbours differ
    with forced(plan):
        assert fastln.plan(some.input.shape[1], dtype).cluster > 1
        alone = [results(some.of(row[None])) for row in some.input]
        for many, parts in zip(results(some.of(some.input[order])), zip(*alone, strict=True), strict=True):
            assert same_bits(many, torch.cat(parts)[order])


@each()
@BY_PLAN
def test_many_rows_match_float64(dtype, plan, pieces, cuda):
    sample = norm_inputs(dtype, cuda, (150 if pieces <= 8192 else 20, whole_cols(dtype, pieces)))
    with forced(plan):
        for form in (
            sample,
            sample.in_dtypes(torch.float32, torch.float32),
            sample.in_dtypes(None, dtype),
            sample.in_dtypes(dtype, None),
            sample.in_dtypes(None, None),
        ):
            assert_norm_matches_float64(fastln.layer_norm(*form), form)


@each()
def test_calls_behind_each_other_see_their_own_rows(dtype, cuda):
    """A launch may begin while the one before it ends."""
    x, shape, weight, bias, _ = norm_inputs(dtype, cuda, (40, whole_cols(dtype, 8192)))
    with forced("pieces=8,threads=128,cluster=8"):
        apart = [x]
        for _ in range(40):
            apart.append(fastln.layer_norm(apart[-1], shape, weight, bias))
            torch.cuda.synchronize()
        behind = [x]
        for _ in range(40):
            behind.append(fastln.layer_norm(behind[-1], shape, weight, bias))
    assert all(same_bits(a, b) for a, b in zip(apart, behind, strict=True))


@each(torch.float16, torch.float64)
def test_rows_apart_and_off_alignment_give_the_same_bits(dtype, cuda):
    sample = norm_inputs(dtype, cuda, (200, whole_cols(dtype, 4096)))
    with forced("pieces=8,threads=64,cluster=8"):
        expected = results(sample)
        for offset, gap in ((0, 16), (16, 0), (1, 0), (0, 1)):
            x = in_padding(sample.input, offset, row_stride=sample.input.shape[1] + gap)[0]
            assert all(same_bits(a, b) for a, b in zip(results(sample.of(x)), expected, strict=True))


@each(torch.float16, torch.float32)
def test_an_infinity_spoils_its_own_row_alone(dtype, cuda):
    sample = norm_inputs(dtype, cuda, (100, whole_cols(dtype, 4096)))
    with forced("pieces=8,threads=64,cluster=8"):
        expected = fastln.layer_norm(*sample)
        spoiled = sample.input.clone()
        spoiled[50, -1] = torch.inf
        y = fastln.layer_norm(*sample.of(spoiled))
    assert y[50].isnan().all()
    others = torch.arange(100, device=cuda) != 50
    assert same_bits(y[others], expected[others])
