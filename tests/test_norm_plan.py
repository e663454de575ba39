"""fastln.plan and forced plans: what is chosen holds the row, depends on nothing but the width and the item size,
and every variant that can be chosen is reached and right."""

import dataclasses
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from norm_support import FWD, assert_norm_matches_float64, each, forced, norm_inputs, past_l2_rows, whole_cols
from reference import same_bits

import fastln
from fastln._norm import force_plan

ITEM_SIZES = (torch.float16, torch.float32, torch.float64)
PIECES = (2, 3, 4, 5, 8)
THREADS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 480, 512)
CLUSTERS = (2, 4, 8, 16)


def some_cols():
    """Every narrow width, those around powers of two up to 2^40, and random ones in between."""
    yield from range(1, 3000)
    draw = random.Random(0)
    for power in range(11, 41):
        yield from (2**power + d for d in (-9, -8, -7, -1, 0, 1, 7, 8, 9) if 2**power + d <= 2**40)
        yield from (draw.randint(2 ** (power - 1), 2**power) for _ in range(40))


def tail_of(cols, dtype):
    """Elements behind the last whole piece of 16 bytes; each takes a thread."""
    return cols % whole_cols(dtype, 1)


def text_of(plan):
    return "split" if plan.pieces == 0 else f"pieces={plan.pieces},threads={plan.threads},cluster={plan.cluster}"


@each()
@pytest.mark.parametrize("most", [1, 8, 16])
def test_a_plan_holds_the_row_in_whole_warps(dtype, most):
    for cols in some_cols():
        plan = fastln.plan(cols, dtype, clusters=most > 1, wide_clusters=most == 16)
        if plan.pieces == 0:
            assert (plan.threads, plan.cluster) == (0, 1)
            continue
        assert plan.pieces in PIECES
        assert plan.pieces * plan.threads * plan.cluster >= cols * dtype.itemsize // 16
        assert plan.threads >= max(tail_of(cols, dtype), 1)
        part = plan.threads in (1, 2, 4, 8, 16)
        assert part or (plan.threads % 32 == 0 and 32 <= plan.threads <= 1024)
        assert not part or plan.pieces in (2, 3)
        assert plan.cluster in (1, *CLUSTERS)
        assert plan.cluster <= most


@each()
def test_a_plan_is_one_that_can_be_forced(dtype):
    plans = {fastln.plan(cols, dtype): cols for cols in some_cols()}
    assert len(plans) > 50
    for plan, cols in plans.items():
        with forced(text_of(plan)):
            assert fastln.plan(cols, dtype) == plan


def test_a_plan_depends_on_width_and_item_size_alone():
    before = {(cols, dtype): fastln.plan(cols, dtype) for cols in some_cols() for dtype in ITEM_SIZES}
    for rows in (1, 100):
        fastln.layer_norm(torch.randn(rows, 768), [768])
    assert {(cols, dtype): fastln.plan(cols, dtype) for cols, dtype in before} == before
    for cols in some_cols():
        assert fastln.plan(cols, torch.float16) == fastln.plan(cols, torch.bfloat16)


def test_plan_of_a_row_is_by_default_that_of_float16_on_a_gpu_with_clusters():
    for cols in (768, 32768, 131072):
        assert fastln.plan(cols) == fastln.plan(cols, torch.float16, True) == fastln.plan(cols=cols, clusters=True)


@each(*ITEM_SIZES)
def test_a_row_that_16_byte_accesses_do_not_divide_has_no_cluster_and_at_most_512_threads(dtype):
    for cols in some_cols():
        if cols * dtype.itemsize % 16:
            plan = fastln.plan(cols, dtype)
            assert plan.cluster == 1
            assert plan.threads <= 512


@each()
def test_clusters_of_16_blocks_take_only_what_8_cannot_hold(dtype):
    for pieces, narrow, wide in ((32768, 8, 8), (32769, 1, 16), (65536, 1, 16), (65537, 1, 1)):
        cols = whole_cols(dtype, pieces)
        assert fastln.plan(cols, dtype, wide_clusters=False).cluster == narrow
        assert fastln.plan(cols, dtype).cluster == wide
        assert fastln.plan(cols, dtype, clusters=False) == fastln.Plan(0, 0, 1)


def test_a_plan_is_immutable_and_hashable():
    plan = fastln.plan(768)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.pieces = 1
    assert hash(plan) == hash(fastln.plan(768))


@pytest.mark.parametrize("cols", [0, -1, -(2**40)])
def test_plan_refuses_a_width_below_1(cols):
    with pytest.raises(ValueError, match=rf"^fastln.plan: expected cols of at least 1, got {cols}$"):
        fastln.plan(cols)


@pytest.mark.parametrize("dtype", ITEM_SIZES, ids=str)
def test_plan_refuses_a_width_of_more_bytes_than_can_be_counted(dtype):
    most = (2**63 - 1) // dtype.itemsize
    assert fastln.plan(most, dtype) == fastln.plan(TOO_LONG, dtype)
    for cols in (most + 1, 2**63, 2**64 + 8, 10**30):
        with pytest.raises(ValueError, match=rf"^fastln.plan: expected cols of at most {most}, got {cols}$"):
            fastln.plan(cols, dtype)


@pytest.mark.parametrize("cols", ["8", 8.0, None, [8]], ids=repr)
def test_plan_refuses_a_width_that_is_no_int(cols):
    with pytest.raises(ValueError, match=rf"^fastln.plan: expected cols to be an int, got {type(cols).__name__}$"):
        fastln.plan(cols)


def test_plan_takes_whatever_is_an_int():
    assert fastln.plan(torch.tensor(768)) == fastln.plan(np.int64(768)) == fastln.plan(768)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool], ids=str)
def test_plan_refuses_a_dtype_that_layer_norm_does_not_take(dtype):
    expected = "expected float16, bfloat16, float32 or float64, got " + str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"^fastln.plan: {expected}$"):
        fastln.plan(768, dtype)


# ------------------------------------------------------------------------------------------ forcing


# Every text that names a variant, but for the many numbers of warps.
VARIANTS = [
    *(f"pieces={n},threads={threads}" for threads in THREADS for n in (PIECES if threads >= 32 else (2, 3))),
    "pieces=4,threads=544",
    "pieces=4,threads=768",
    "pieces=8,threads=1024",
    *(f"pieces=8,threads={threads},cluster={cluster}" for cluster in CLUSTERS for threads in (32, 64, 480, 512)),
    "split",
]


TOO_LONG = 2**20  # keeps its own plan, whichever other one is forced


def parsed(text):
    if text == "split":
        return fastln.Plan(0, 0, 1)
    return fastln.Plan(**{"cluster": 1, **{k: int(v) for k, v in (part.split("=") for part in text.split(","))}})


def held_cols(dtype, text):
    """Rows for this variant: the longest, shorter ones, and with a tail where it takes one."""
    plan = parsed(text)
    if dtype == torch.float64 and plan.pieces == 4 and plan.threads > 512:
        return ()  # which would take more registers than a block can have
    if text == "split":
        return 1, 7, 8, 33, 1024, 16384, 16385, 70001
    most = whole_cols(dtype, plan.pieces * plan.threads * plan.cluster)
    half = whole_cols(dtype, plan.pieces * plan.threads * plan.cluster // 2 + 1)
    if plan.cluster > 1 or plan.pieces == 5 or (plan.pieces == 8 and plan.threads > 512):
        return most, half
    tail = min(whole_cols(dtype, 1) - 1, plan.threads)
    return most, half, most + tail, half + 1, tail


@pytest.mark.parametrize("text", VARIANTS)
def test_every_variant_can_be_forced_on_the_rows_it_holds(text):
    for dtype in ITEM_SIZES:
        own = fastln.plan(TOO_LONG, dtype)
        with forced(text):
            for cols in held_cols(dtype, text):
                assert fastln.plan(cols, dtype) == parsed(text)
            assert fastln.plan(TOO_LONG, dtype) == (parsed(text) if text == "split" else own)
        assert fastln.plan(TOO_LONG, dtype) == own


def test_a_forced_plan_ends_with_the_empty_text():
    own = fastln.plan(768)
    force_plan("split")
    assert fastln.plan(768) != own
    force_plan("")
    assert fastln.plan(768) == own


INVALID = [
    *("nonsense", "pieces", "pieces=4", "threads=128", "pieces=4,threads=128,rows=2", "pieces=4;threads=128"),
    *(
        "pieces=,threads=128",
        "pieces=four,threads=128",
        "pieces=4,threads=128,cluster=",
        "Split",
        "pieces=4=4,threads=32",
    ),
    *("pieces=1,threads=128", "pieces=6,threads=128", "pieces=0,threads=0", "pieces=-1,threads=128"),
    *("pieces=4,threads=0", "pieces=4,threads=3", "pieces=4,threads=33", "pieces=4,threads=-32"),
    *(
        "pieces=3,threads=544",
        "pieces=4,threads=800",
        "pieces=4,threads=1024",
        "pieces=8,threads=1056",
        "pieces=8,threads=1024,cluster=2",
    ),
    *("pieces=4,threads=128,cluster=2", "pieces=8,threads=128,cluster=3", "pieces=8,threads=128,cluster=32"),
    *("pieces=8,threads=16,cluster=2", "pieces=8,threads=128,cluster=0", "pieces=8,threads=128,cluster=-1"),
]


@pytest.mark.parametrize("text", INVALID)
def test_a_text_that_names_no_variant_is_refused_and_changes_nothing(text):
    with forced("pieces=8,threads=64"):
        with pytest.raises(ValueError) as caught:
            force_plan(text)
        assert str(caught.value) == f'fastln: expected a plan like "pieces=4,threads=128", got "{text}"'
        assert fastln.plan(100) == fastln.Plan(8, 64, 1)


PRINT_PLAN = "import fastln; print(fastln.plan(768))"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pieces=8,threads=64", "Plan(pieces=8, threads=64, cluster=1)"),
        ("pieces=9,threads=64", 'fastln: expected a plan like "pieces=4,threads=128", got "pieces=9,threads=64"'),
    ],
    ids=["valid", "invalid"],
)
def test_environment_variable_forces_a_plan_from_the_start(text, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLN_PLAN", text)
    done = subprocess.run([sys.executable, "-c", PRINT_PLAN], cwd=tmp_path, capture_output=True, text=True)
    assert (expected in done.stdout) == (done.returncode == 0)
    assert expected in done.stdout + done.stderr
    assert (done.returncode == 0) == expected.startswith("Plan")


# ---------------------------------------------------------------------------------------- on a GPU


def skip_without_clusters(text):
    if "cluster" in text and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs thread block clusters")


@pytest.mark.parametrize("text", VARIANTS)
def test_every_variant_matches_float64(text, cuda):
    skip_without_clusters(text)
    with forced(text):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for cols in held_cols(dtype, text):
                sample = norm_inputs(dtype, cuda, (3 if cols > 512 else 131, cols))
                for form in (sample, sample.in_dtypes(torch.float32, torch.float32), sample.in_dtypes(None, None)):
                    assert_norm_matches_float64(fastln.layer_norm(*form), form)


@each()
@pytest.mark.parametrize("pieces", [16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 640, 1024, 2560, 3072, 4096])
def test_full_rows_have_the_same_bits_without_a_kernel_of_their_own(dtype, pieces, cuda):
    """Full rows with weight and bias have kernels that ask nothing; ones or zeros left out take the general ones. Both
    ways in a handful of rows, in odd numbers of them, and in more than stay resident, within the L2 and past it."""
    cols = whole_cols(dtype, pieces)
    most = past_l2_rows(cols, dtype)
    for rows in (1, 3, 67, 4095, most // 3 | 1, most | 1):
        sample = norm_inputs(dtype, cuda, (min(rows, 67), cols))
        sample = sample.of(sample.input.repeat(rows // 67 + 1, 1)[:rows])
        ones, zeros = torch.ones_like(sample.weight), torch.zeros_like(sample.bias)
        for param in (dtype, torch.float32):
            full = sample.in_dtypes(param, param)
            for general in (full._replace(weight=None), full._replace(bias=None)):
                weight = ones.to(param) if general.weight is None else general.weight
                bias = zeros.to(param) if general.bias is None else general.bias
                expected = FWD(*general)
                for a, b in zip(FWD(*general._replace(weight=weight, bias=bias)), expected, strict=True):
                    assert same_bits(a, b)


@each()
def test_fetching_the_parameters_early_or_late_changes_no_bit(dtype, cuda):
    """Past the L2 four and five pieces a thread fetch them late; that is the same rows in a larger tensor."""
    for pieces, cols in ((4, whole_cols(dtype, 512)), (4, whole_cols(dtype, 512) - 1), (5, whole_cols(dtype, 640))):
        with forced(f"pieces={pieces},threads=128"):
            sample = norm_inputs(dtype, cuda, (7, cols))
            copies = torch.cuda.get_device_properties(cuda).L2_cache_size // sample.input.nbytes + 1
            late = fastln.layer_norm(*sample.of(sample.input.repeat(copies, 1)))
            assert same_bits(late.view(copies, 7, cols), fastln.layer_norm(*sample).expand(copies, 7, cols))
