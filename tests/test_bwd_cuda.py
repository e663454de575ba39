"""fastln::layer_norm_bwd where only a GPU has a say: streams, graphs, sweeps of rows and columns, several devices."""

import math

import pytest
import torch
from bwd_support import ALL, BWD, TENSORS, all_same, assert_gradients_match_float64, backward, leaves, stats, upstream
from norm_support import each, norm_inputs
from reference import in_padding, same_bits

import fastln

SLEEP_CYCLES = 100_000_000  # about 50 ms: far longer than it takes to enqueue what comes after

# (rows, cols), in float16: part of a warp, odd and even rows, many and few of them, some whose columns clusters sum, a
# block, two that share their partial sums, past what one holds.
SHAPES = (
    (5, 33),
    (4096, 64),
    (64, 768),
    (3, 769),
    (1, 8192),
    (5, 8193),
    (700, 1024),
    (3000, 1024),
    (400, 8192),
    (3, 32768),
    (2, 70001),
    (2, 131072),
)
shapes = pytest.mark.parametrize(("rows", "cols"), SHAPES)


def arguments(sample, dy=None):
    """The tensors of a call, in the op's order, but for the sizes and the mask."""
    return [upstream(sample) if dy is None else dy, sample.input, *stats(sample), sample.weight, sample.bias]


def call(tensors, mask=ALL):
    dy, x, mean, rstd, weight, bias = tensors
    return BWD(dy, x, [x.shape[-1]], mean, rstd, weight, bias, mask)


def apart(t):
    """A view of the values of t whose columns are apart: it has to be copied."""
    return torch.stack([t, t], dim=-1)[..., 0]


def misaligned(t):
    return in_padding(t[None], 1)[0][0]


# Arguments that are read in place, and that need a copy of one kind or another first.
FORMS = {
    "in_place": lambda dy, x, mean, rstd, weight, bias: [dy, x, mean, rstd, weight, bias],
    "copied": lambda dy, x, mean, rstd, weight, bias: [apart(dy), apart(x), apart(mean), apart(rstd), weight, bias],
    "parameters_copied": lambda dy, x, mean, rstd, weight, bias: [dy, x, mean, rstd, misaligned(weight), bias],
    "parameters_converted": lambda dy, x, mean, rstd, weight, bias: [dy, x, mean, rstd, weight.double(), bias.float()],
}


def blank(tensors):
    return [torch.full_like(t, math.nan) for t in tensors]


def fill(late, tensors):
    for target, source in zip(late, tensors, strict=True):
        target.copy_(source)


@shapes
def test_case_42_launches_and_copies_on_the_current_stream(rows, cols, cuda):
    """A side stream writes the arguments after a long sleep; what ran on another stream would read NaNs."""
    tensors = arguments(norm_inputs(torch.float16, cuda, (rows, cols)))
    late = {form: make(*blank(tensors)) for form, make in FORMS.items()}
    expected = {form: call(make(*tensors)) for form, make in FORMS.items()}
    for form in late.values():
        call(form)  # loads the kernels, which may synchronize
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        results = {}
        for form, late_tensors in late.items():
            fill(late_tensors, tensors)
            results[form] = call(late_tensors)
    side.synchronize()
    for form, got in results.items():
        assert all_same(got, expected[form]), form


def test_autograd_runs_the_backward_on_the_stream_of_the_forward(cuda):
    sample = norm_inputs(torch.float16, cuda, (64, 768))
    dy = upstream(sample)
    expected = backward(dy, sample)
    late = leaves(sample.of(torch.full_like(sample.input, math.nan)), *TENSORS)
    fastln.layer_norm(*late).sum().backward()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        with torch.no_grad():
            late.input.copy_(sample.input)
        y = fastln.layer_norm(*late)
        got = torch.autograd.grad(y, (late.input, late.weight, late.bias), dy)
    side.synchronize()
    assert all_same(got, expected)


@shapes
def test_two_streams_at_once_share_nothing(rows, cols, cuda):
    sets = [arguments(norm_inputs(torch.float16, cuda, (rows, cols), seed=seed)) for seed in range(2)]
    expected = [call(tensors) for tensors in sets]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for stream, tensors, kept in zip(streams, sets, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(call(tensors))
    torch.cuda.synchronize()
    for kept, right in zip(results, expected, strict=True):
        assert all(all_same(got, right) for got in kept)


@pytest.mark.parametrize("form", FORMS)
@shapes
def test_graph_replay_sees_new_values(form, rows, cols, cuda):
    tensors = FORMS[form](*blank(arguments(norm_inputs(torch.float16, cuda, (rows, cols)))))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch asks for a warm-up off the default stream
        call(tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(tensors)
    for seed in (1, 2, 1):
        fresh = arguments(norm_inputs(torch.float16, cuda, (rows, cols), seed=seed))
        fill(tensors, fresh)
        for t in results:
            t.fill_(math.nan)
        graph.replay()
        assert all_same(results, call(FORMS[form](*fresh)))


def test_a_whole_training_step_replays_in_a_graph(cuda):
    sample = leaves(norm_inputs(torch.float16, cuda, (64, 768)), *TENSORS)
    parameters = (sample.input, sample.weight, sample.bias)
    dy = upstream(sample)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(fastln.layer_norm(*sample), parameters, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(fastln.layer_norm(*sample), parameters, dy)
    for seed in (1, 2):
        fresh = norm_inputs(torch.float16, cuda, (64, 768), seed=seed)
        with torch.no_grad():
            fill(parameters, (fresh.input, fresh.weight, fresh.bias))
        graph.replay()
        assert all_same(got, backward(dy, fresh))


def test_a_launch_does_not_wait_for_the_gpu(cuda):
    sets = [arguments(norm_inputs(torch.float16, cuda, shape)) for shape in SHAPES]
    forms = [make(*tensors) for make in FORMS.values() for tensors in sets]
    for form in forms:
        call(form)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    asleep = torch.cuda.Event()
    asleep.record()
    for form in forms:
        call(form)
    assert not asleep.query(), "a call returned only after earlier work of the stream had finished"
    torch.cuda.synchronize()


@each(torch.float16, torch.float32)
@shapes
def test_case_37_a_hundred_calls_give_the_same_bits(dtype, rows, cols, cuda):
    tensors = arguments(norm_inputs(dtype, cuda, (rows, cols)))
    expected = call(tensors)
    assert all(all_same(call(tensors), expected) for _ in range(100))


@each()
@shapes
def test_dx_has_the_same_bits_whatever_else_is_asked_for(dtype, rows, cols, cuda):
    tensors = arguments(norm_inputs(dtype, cuda, (rows, cols)))
    expected = call(tensors)[0]
    for mask in ((True, False, False), (True, True, False), (True, False, True)):
        assert same_bits(call(tensors, mask)[0], expected)


def poisoned(sample, names=TENSORS):
    """Gradients whose memory is one that NaNs were freed from."""
    dy, statistics = upstream(sample), stats(sample)
    poison = [
        torch.full_like(t, math.nan) for t in (dy, dy, sample.weight, sample.weight, sample.weight) for _ in range(2)
    ]
    del poison
    mask = tuple(name in names for name in TENSORS)
    assert_gradients_match_float64(backward(dy, sample, mask, statistics), dy, sample, names)


@each()
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 131, 132, 133, 264, 321, 1025, 3000, 5000])
def test_sweep_of_rows(rows, dtype, cuda):
    for cols in (1, 8, 33, 64, 100, 256, 768, 1025):
        poisoned(norm_inputs(dtype, cuda, (rows, cols)))


@each()
@pytest.mark.parametrize("names", [TENSORS, ("input",), ("weight", "bias"), ("bias",)], ids="_".join)
def test_sweep_of_columns(names, dtype, cuda):
    around = {k + d for k in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384) for d in (-1, 0, 1, 4, 8)}
    others = {1, 2, 3, 4, 5, 7, 9, 12, 15, 17, 96, 100, 320, 640, 769, 1284, 1536, 5120, 6004, 8188, 12288}
    for cols in sorted(around | others):
        for rows in (1, 7, 200) if cols <= 1025 else (1, 7):
            poisoned(norm_inputs(dtype, cuda, (rows, cols)), names)


@each()
def test_sweep_of_wide_rows(dtype, cuda):
    for cols in (16385, 20480, 32768, 32769, 65536, 70001, 131072, 262144, 262147):
        for rows in (1, 2, 9):
            poisoned(norm_inputs(dtype, cuda, (rows, cols)))


def test_arguments_on_a_gpu_that_is_not_the_current_one(second_cuda):
    assert torch.cuda.current_device() == 0
    for shape in SHAPES:
        sample = norm_inputs(torch.float16, second_cuda, shape)
        tensors = arguments(sample)
        for form, make in FORMS.items():
            got = call(make(*tensors))
            assert all(t.device == second_cuda for t in got)
            if form == "in_place":
                assert_gradients_match_float64(got, tensors[0], sample)
    assert torch.cuda.current_device() == 0
