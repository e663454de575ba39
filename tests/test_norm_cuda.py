"""fastln.layer_norm where only a GPU has a say: streams, graphs, several devices, and which kernels run."""

import itertools
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from needs import missing
from norm_support import CALLS, FWD, assert_norm_matches_float64, forced, norm_inputs, past_l2_rows, whole_cols
from reference import in_padding, same_bits

import fastln

SLEEP_CYCLES = 100_000_000  # about 50 ms: far longer than it takes to enqueue what comes after

# In float16: part of a warp, shifted and whole, a warp, a block, as many threads as shifted rows may have, clusters
# of several rows a block, of fewer, and of 16 blocks, a row in chunks, shifted and whole.
WIDTHS = (33, 64, 768, 8193, 32767, 65536, 131072, 300000, 70001, 540672)


def apart(x):
    """A view of the values of x whose columns are apart: it has to be copied."""
    return torch.stack([x, x], dim=-1)[..., 0]


def misaligned(t):
    return in_padding(t.view(1, -1), 1)[0][0]


# Samples that are read in place, and that need a copy of one kind or another first.
FORMS = {
    "in_place": lambda sample: sample,
    "input_copied": lambda sample: sample.of(apart(sample.input)),
    "parameters_copied": lambda s: s._replace(weight=misaligned(s.weight), bias=misaligned(s.bias)),
    "parameters_converted": lambda sample: sample.in_dtypes(torch.float64, torch.float64),
}
TENSORS = ("input", "weight", "bias")


def blank(sample):
    return sample._replace(**{name: torch.full_like(getattr(sample, name), math.nan) for name in TENSORS})


def fill(late, sample):
    for name in TENSORS:
        getattr(late, name).copy_(getattr(sample, name))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("cols", WIDTHS)
def test_case_42_launches_and_copies_on_the_current_stream(call, cols, cuda):
    """A side stream writes the arguments after a long sleep; what ran on another stream would read NaNs."""
    sample = norm_inputs(torch.float16, cuda, (5, cols))
    expected = call(*sample)
    late = {form: make(blank(sample)) for form, make in FORMS.items()}
    for form in late.values():
        call(*form)  # loads the kernels, which may synchronize
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        results = {}
        for form, arguments in late.items():
            fill(arguments, sample)
            results[form] = call(*arguments)
    side.synchronize()
    for form, y in results.items():
        assert same_bits(y, expected), form


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cols", WIDTHS)
def test_graph_replay_sees_new_values(form, cols, cuda):
    arguments = FORMS[form](blank(norm_inputs(torch.float16, cuda, (5, cols))))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch asks for a warm-up off the default stream
        fastln.layer_norm(*arguments)
        FWD(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = fastln.layer_norm(*arguments), *FWD(*arguments)
    for seed in (1, 2, 1):
        sample = norm_inputs(torch.float16, cuda, (5, cols), seed=seed)
        fill(arguments, sample)
        for t in results:
            t.fill_(math.nan)
        graph.replay()
        for t, expected in zip(results, (fastln.layer_norm(*sample), *FWD(*sample)), strict=True):
            assert same_bits(t, expected)


@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (3, 33), (64, 768), (4096, 1024), (512, 8193), (20, 131072)])
def test_a_chain_of_calls_sees_what_the_call_before_wrote(rows, cols, cuda):
    """Blocks of a call may be set up while those of the one before still run."""
    sample = norm_inputs(torch.float16, cuda, (rows, cols))

    def chain(pause):
        y = sample.input
        for _ in range(30):
            y = fastln.layer_norm(*sample.of(y))
            pause()
            y = fastln.layer_norm(*sample.of(y + 1)) * 2
            pause()
        return y

    expected = chain(torch.cuda.synchronize)
    assert all(same_bits(chain(lambda: None), expected) for _ in range(3))


def test_a_launch_does_not_wait_for_the_gpu(cuda):
    samples = [norm_inputs(torch.float16, cuda, (5, cols)) for cols in WIDTHS]
    forms = [make(sample) for make in FORMS.values() for sample in samples]
    for form in forms:
        fastln.layer_norm(*form)

    def finish_before_earlier_work():
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        asleep = torch.cuda.Event()
        asleep.record()
        for form in forms:
            fastln.layer_norm(*form)
        return not asleep.query()

    # Three times, for the host may be kept from its calls that long by other processes, but hardly each time.
    finished = any(finish_before_earlier_work() for _ in range(3))
    torch.cuda.synchronize()
    assert finished, "calls returned only after earlier work of the stream had finished"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_case_48_input_on_a_gpu_that_is_not_the_current_one(call, second_cuda):
    assert torch.cuda.current_device() == 0
    x = torch.tensor([1.5, 0.0, 0.0, 0.0], device=second_cuda)
    assert call(x, [4]).cpu().tolist() == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=2e-3)
    for cols in WIDTHS:
        sample = norm_inputs(torch.float16, second_cuda, (5, cols))
        for make in FORMS.values():
            y = call(*make(sample))
            assert y.device == second_cuda
            assert_norm_matches_float64(y, sample)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_side_stream_of_a_gpu_that_is_not_the_current_one(call, second_cuda):
    sample = norm_inputs(torch.float16, second_cuda, (5, 1025))
    expected = call(*sample)
    late = blank(sample)
    torch.cuda.synchronize(second_cuda)
    side = torch.cuda.Stream(second_cuda)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        fill(late, sample)
        with torch.cuda.device(0):
            y = call(*late)
    side.synchronize()
    assert same_bits(y, expected)


# ---------------------------------------------------------------------------- which kernels there are

TEMPLATE = re.compile(r"fastln::((?:norm_forward|norm_short|norm_walk|norm_bundle|norm_cluster|split_\w+)<.*?>)\(")


def compiled_variants():
    """The general kernels in the installed library, as C++ writes them."""
    if shutil.which("c++filt") is None:
        missing("c++filt")
    library = Path(fastln.__file__).with_name("libfastln.so").read_bytes()
    mangled = set(
        re.findall(
            rb"_ZN6fastln\d+(?:norm_forward|norm_short|norm_walk|norm_bundle|norm_cluster|split_[a-z_]+)I\w+", library
        )
    )
    plain = subprocess.run(["c++filt"], input=b"\n".join(mangled), capture_output=True, check=True).stdout.decode()
    return {match[1] for line in plain.splitlines() if (match := TEMPLATE.match(line.removeprefix("void ")))}


def call_every_variant():
    """Every way to a kernel: dtypes of input and parameters, pieces, threads, alignment, within and past the L2, and
    for full rows with both parameters or one."""
    pairs = [(d, d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    pairs += [(torch.float16, torch.float32), (torch.bfloat16, torch.float32)]
    plans = {16: ("pieces=2,threads=8", "pieces=3,threads=8"), 32: ("pieces=2,threads=16",)}  # by pieces in the row
    plans |= {n * t: (f"pieces={n},threads={t}",) for n in (2, 3, 4, 5, 8) for t in (32, 160)}  # full
    plans |= {512: ("pieces=4,threads=128",), 2560: ("pieces=4,threads=640",)}
    plans[128] += *(f"pieces={n},threads=64" for n in (2, 3, 4, 5, 8)), "pieces=8,threads=32,cluster=2", "split"
    for dtype, param in pairs:
        for pieces, texts in plans.items():
            cols = whole_cols(dtype, pieces)
            for rows in (2, past_l2_rows(cols, dtype)):
                x = torch.zeros(rows, cols + 1, dtype=dtype, device="cuda")
                weight, bias = torch.ones(2, cols, dtype=param, device="cuda")
                # Whole rows, rows of whole pieces that begin anywhere, pairs of words if 16-bit, words, and what are
                # no words if 16-bit; the pairs and words at their places, and not.
                narrower = [x[:, : cols - less] for less in (4, 2, 1)]
                forms = (x[:, :cols].contiguous(), x[:, 1:], *narrower, *(t.contiguous() for t in narrower[:2]))
                for plan, form in itertools.product(texts, forms):
                    k = form.shape[1]
                    with forced(plan):
                        for b in (bias[:k], None):
                            fastln.layer_norm(form, [k], weight[:k], b)
    # Many rows that no plan has to be forced for, side by side and apart: of odd columns, and of pairs of words.
    bundles = [*itertools.product((2, 3), (1, 2, 4, 8, 16, 32, 64)), (4, 128)]
    for dtype, (n, t), more in itertools.product((torch.float16, torch.bfloat16), bundles, (1, 4)):
        k = whole_cols(dtype, n * t) + more
        apart = torch.zeros(past_l2_rows(k, dtype), k + 4, dtype=dtype, device="cuda")[:, :k]
        for x in (apart, apart.contiguous()):
            fastln.layer_norm(x, [k])


def test_every_compiled_variant_is_reached(cuda):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs thread block clusters")
    call_every_variant()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call_every_variant()
        torch.cuda.synchronize()
    names = {event.name for event in profile.events()}
    if not any("fastln" in name for name in names):
        pytest.skip("torch's profiler sees no kernel here: it needs CUPTI, and leave to use it")
    launched = {match[1] for name in names if (match := TEMPLATE.search(name))}
    compiled = compiled_variants()
    # Both sets are what TEMPLATE and compiled_variants() recognize. A kernel that they lose is missing from both; only
    # a floor just below today's count (about 365) tells.
    assert len(compiled) >= 360
    assert launched == compiled
