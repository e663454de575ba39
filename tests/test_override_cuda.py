"""F.layer_norm under fastln.override: our kernels, and everything else as torch's own have it."""

import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from norm_support import assert_norm_matches_float64, dtype_id, each, norm_inputs
from reference import same_bits

import fastln

SLEEP_CYCLES = 100_000_000  # about 50 ms: far longer than it takes to enqueue what comes after

SHAPES = {
    "rows": ((15, 768), 1),
    "odd": ((3, 5, 33), 1),
    "two_dimensions": ((15, 4, 8), 2),
    "whole_tensor": ((4, 8), 2),
    "one_column": ((5, 1), 1),
    "no_rows": ((0, 33), 1),
    "no_columns": ((3, 0), 1),
    "nothing": ((0, 0), 1),
    "cluster": ((2, 65536), 1),
    "split": ((2, 300000), 1),
}
shapes = pytest.mark.parametrize(("shape", "dims"), SHAPES.values(), ids=SHAPES)
PARAMETERS = {"both": (True, True), "weight": (True, False), "bias": (False, True), "none": (False, False)}
parameters = pytest.mark.parametrize(("weight", "bias"), PARAMETERS.values(), ids=PARAMETERS)

LAYOUTS = {
    "transposed": ((33, 15), lambda x: x.t()),
    "every_second_column": ((15, 66), lambda x: x[:, ::2]),
    "cut_out": ((15, 40), lambda x: x[:, 1:34]),
    "one_row_expanded": ((1, 33), lambda x: x.expand(15, 33)),
    "overlapping_rows": ((47,), lambda x: x.unfold(0, 33, 1)),
    "rows_transposed": ((3, 5, 33), lambda x: x.transpose(0, 1)),
    "channels_last": ((2, 4, 5, 33), lambda x: x.contiguous(memory_format=torch.channels_last)),
}


def some_of(sample, weight, bias):
    return sample._replace(weight=sample.weight if weight else None, bias=sample.bias if bias else None)


def facts(t):
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad)


def gradients(sample, view=lambda x: x, grad=None):
    """F.layer_norm's output and the gradients of what is there, each of a leaf of its own."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (sample.input, *sample[2:4])]
    y = F.layer_norm(view(leaves[0]), sample.normalized_shape, *leaves[1:], sample.eps)
    grad = torch.linspace(-2, 2, y.numel(), device=y.device).to(y.dtype).view(y.shape) if grad is None else grad(y)
    present = [t for t in leaves if t is not None]
    return [y, *torch.autograd.grad(y, present, grad)]


def in_float64(sample):
    return sample._replace(**{n: t.double() for n, t in sample._asdict().items() if isinstance(t, torch.Tensor)})


def assert_close_to_float64(got, exact, relative):
    for a, b in zip(got, exact, strict=True):
        atol = relative * max(1.0, b.abs().max().item() if b.numel() else 0.0)
        torch.testing.assert_close(a.double(), b, rtol=relative, atol=atol, equal_nan=True)


@shapes
@parameters
@each()
def test_outputs_are_ours_and_look_like_those_of_torch(shape, dims, weight, bias, dtype, cuda):
    sample = some_of(norm_inputs(dtype, cuda, shape, dims=dims), weight, bias)
    stock = torch.native_layer_norm(*sample)
    with fastln.override():
        got = torch.native_layer_norm(*sample)
        y = F.layer_norm(*sample)
    assert [facts(t) for t in got] == [facts(t) for t in stock]
    assert same_bits(got[0], fastln.layer_norm(*sample))
    assert same_bits(y, got[0])
    if y.numel():
        assert_norm_matches_float64(y, sample)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for a, b in zip(got[1:], stock[1:], strict=True):
        torch.testing.assert_close(a, b.to(wide), rtol=1e-5, atol=1e-5, equal_nan=True)


RELATIVE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}


@shapes
@parameters
@each()
def test_gradients_are_right_and_look_like_those_of_torch(shape, dims, weight, bias, dtype, cuda):
    sample = some_of(norm_inputs(dtype, cuda, shape, dims=dims), weight, bias)
    stock = gradients(sample)
    with fastln.override():
        got = gradients(sample)
    assert [facts(t) for t in got] == [facts(t) for t in stock]
    assert_close_to_float64(got[1:], gradients(in_float64(sample))[1:], RELATIVE[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@each(torch.float16, torch.float32)
def test_layouts_of_all_kinds(layout, dtype, cuda):
    shape, view = LAYOUTS[layout]
    x = norm_inputs(dtype, cuda, shape).input
    sample = norm_inputs(dtype, cuda, (15, 33)).of(x)
    stock = gradients(sample, view)
    with fastln.override():
        got = gradients(sample, view)
    assert [facts(t) for t in got] == [facts(t) for t in stock]
    assert_close_to_float64(got[1:], gradients(in_float64(sample), view)[1:], RELATIVE[dtype])


def test_gradients_of_the_output_in_all_layouts(cuda):
    sample = norm_inputs(torch.float32, cuda, (15, 33))
    grads = {
        "expanded": lambda y: y.new_ones(()).expand(y.shape),
        "transposed": lambda y: torch.randn(33, 15, device=cuda).t(),
        "cut_out": lambda y: torch.randn(15, 40, device=cuda)[:, 1:34],
    }
    for make in grads.values():
        torch.manual_seed(0)
        with fastln.override():
            got = gradients(sample, grad=make)
        torch.manual_seed(0)
        exact = gradients(in_float64(sample), grad=lambda y, make=make: make(y).double())
        assert_close_to_float64(got[1:], exact[1:], 1e-5)


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)), ids=str)
def test_gradients_that_are_not_asked_for_are_undefined(mask, cuda):
    sample = norm_inputs(torch.float32, cuda, (15, 33))
    _, mean, rstd = torch.native_layer_norm(*sample)
    arguments = torch.ones_like(sample.input), sample.input, [33], mean, rstd, sample.weight, sample.bias, list(mask)
    stock = torch.ops.aten.native_layer_norm_backward(*arguments)
    with fastln.override():
        got = torch.ops.aten.native_layer_norm_backward(*arguments)
    assert [facts(t) for t in got] == [facts(t) for t in stock]
    assert [t is not None for t in got] == list(mask)


def test_second_derivatives_are_right(cuda):
    sample = norm_inputs(torch.float64, cuda, (2, 5))
    for present in ((), ("weight",), ("weight", "bias")):  # torch's own are wrong for a bias without a weight
        tensors = [getattr(sample, name).detach().clone().requires_grad_() for name in ("input", *present)]
        with fastln.override():
            assert torch.autograd.gradcheck(lambda x, *others: F.layer_norm(x, [5], *others), tensors)
            assert torch.autograd.gradgradcheck(lambda x, *others: F.layer_norm(x, [5], *others), tensors)


def test_forward_mode_and_transforms_give_what_they_give_without(cuda):
    sample = norm_inputs(torch.float64, cuda, (4, 33))
    x, tangent = sample.input, norm_inputs(torch.float64, cuda, (4, 33), seed=1).input

    def norm(t):
        return F.layer_norm(t, [33], sample.weight, sample.bias)

    def jvp():
        return torch.func.jvp(norm, (x,), (tangent,))[1]

    def per_sample():
        return torch.func.vmap(torch.func.grad(lambda t: norm(t).pow(3).sum()))(x)

    def batched_weight():
        weights = torch.stack([sample.weight, 2 * sample.weight])
        return torch.func.vmap(lambda w: F.layer_norm(x, [33], w, sample.bias))(weights)

    for function in (
        jvp,
        per_sample,
        batched_weight,
        lambda: torch.func.hessian(lambda t: norm(t).pow(3).sum())(x[:1]),
    ):
        expected = function()
        with fastln.override():
            torch.testing.assert_close(function(), expected)


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=dtype_id)
@each(torch.float16, torch.bfloat16, torch.float32)
def test_autocast_is_that_of_torch(dtype, autocast, cuda):
    sample = norm_inputs(dtype, cuda, (15, 33)).in_dtypes(torch.float32, torch.float32)
    with torch.autocast("cuda", autocast), fastln.override():
        y = F.layer_norm(*sample)
    assert y.dtype == torch.float32
    assert same_bits(y, fastln.layer_norm(*sample.of(sample.input.float())))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_give_what_they_give_without(layout, cuda):
    parts = [norm_inputs(torch.float32, cuda, (rows, 33)).input for rows in (2, 3)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    sample = norm_inputs(torch.float32, cuda, (5, 33))
    expected = F.layer_norm(nested, [33], sample.weight, sample.bias)
    with fastln.override():
        got = F.layer_norm(nested, [33], sample.weight, sample.bias)
    for a, b in zip(got.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------- refused


def message(function):
    try:
        function()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


REFUSED = {
    "int": lambda x, w: F.layer_norm(x.int(), [33]),
    "bool": lambda x, w: F.layer_norm(x.bool(), [33]),
    "complex": lambda x, w: F.layer_norm(x.to(torch.complex64), [33]),
    "no_shape": lambda x, w: F.layer_norm(x, []),
    "other_shape": lambda x, w: F.layer_norm(x, [32]),
    "too_many_dimensions": lambda x, w: F.layer_norm(x, [1, 5, 33]),
    "weight_shape": lambda x, w: F.layer_norm(x, [33], w[:32]),
    "bias_shape": lambda x, w: F.layer_norm(x, [33], None, w[:, None]),
    "weight_dtype": lambda x, w: F.layer_norm(x, [33], w.half()),
    "bias_dtype": lambda x, w: F.layer_norm(x, [33], w, w.double()),
    "weight_device": lambda x, w: F.layer_norm(x, [33], w.cpu()),
    "bias_device": lambda x, w: F.layer_norm(x, [33], w, w.cpu()),
    "input_device": lambda x, w: F.layer_norm(x.cpu(), [33], w),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(call, cuda):
    sample = norm_inputs(torch.float32, cuda, (5, 33))
    expected = message(lambda: call(sample.input, sample.weight))
    assert expected is not None
    with fastln.override():
        assert message(lambda: call(sample.input, sample.weight)) == expected
    torch.cuda.synchronize()


# ------------------------------------------------------------------------------------ process and device


def test_holds_in_every_thread_the_backward_ones_too(cuda):
    sample = norm_inputs(torch.float16, cuda, (15, 768))
    expected, got = fastln.layer_norm(*sample), []
    with fastln.override():
        thread = threading.Thread(target=lambda: got.append(gradients(sample)))
        thread.start()
        thread.join()
    assert same_bits(got[0][0].detach(), expected)
    assert_close_to_float64(got[0][1:], gradients(in_float64(sample))[1:], 4e-3)


def test_each_switch_holds_for_all_threads_at_their_next_call(cuda):
    """The threads rest while it changes, as override() asks for."""
    sample = norm_inputs(torch.float16, cuda, (15, 768))
    stock = gradients(sample)[:2]
    with fastln.override():
        ours = gradients(sample)[:2]
    step, wrong, rounds = threading.Barrier(3, timeout=60), [], 200

    def work():
        for turn in range(rounds):
            step.wait()
            expected = ours if turn % 2 else stock
            if not all(same_bits(a.detach(), b.detach()) for a, b in zip(gradients(sample)[:2], expected, strict=True)):
                wrong.append(turn)
            step.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    held = None
    for turn in range(rounds):
        if turn % 2:
            held = fastln.override()
        elif held is not None:
            held.undo()
        step.wait()
        step.wait()
    for thread in threads:
        thread.join()
    held.undo()
    assert not wrong


def test_launches_on_the_current_stream(cuda):
    sample = norm_inputs(torch.float16, cuda, (15, 768))
    expected = fastln.layer_norm(*sample)
    late = torch.zeros_like(sample.input)
    with fastln.override():
        F.layer_norm(*sample)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            late.copy_(sample.input)
            y = F.layer_norm(*sample.of(late))
        side.synchronize()
    assert same_bits(y, expected)


def test_a_training_step_replays_from_a_cuda_graph(cuda):
    sample = norm_inputs(torch.float16, cuda, (15, 768))
    with fastln.override():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            gradients(sample)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gradients(sample)
        for seed in (1, 2):
            other = norm_inputs(torch.float16, cuda, (15, 768), seed=seed)
            sample.input.copy_(other.input)
            graph.replay()
            expected = gradients(sample)
            assert all(same_bits(a.detach(), b.detach()) for a, b in zip(captured, expected, strict=True))


def test_runs_on_a_device_that_is_not_current(second_cuda):
    sample = norm_inputs(torch.float32, second_cuda, (15, 33))
    with fastln.override():
        got = gradients(sample)
    assert all(t.device == second_cuda for t in got)
    assert_close_to_float64(got[1:], gradients(in_float64(sample))[1:], 1e-5)


@pytest.mark.slow
def test_compiled_code_is_what_it_is_without(cuda, inductor, fresh_compiler):
    sample = norm_inputs(torch.float32, cuda, (15, 33))

    def both(x, weight, bias):
        return F.layer_norm(F.layer_norm(x, [33], weight, bias) + x, [33], weight, bias)

    expected = both(sample.input, sample.weight, sample.bias)
    with fastln.override():
        got = torch.compile(both, fullgraph=True)(sample.input, sample.weight, sample.bias)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
