"""Gradients of fastln.layer_norm, and what the grad modes leave of its cost and of its bits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from bwd_support import MIXTURES, TENSORS, leaves
from norm_support import CALLS, FWD, Norm, assert_norm_matches_float64, each, norm_inputs
from reference import same_bits
from torch.fx.experimental.proxy_tensor import make_fx

import fastln

SUBSETS = [names for n in (1, 2, 3) for names in itertools.combinations(TENSORS, n)]
# Of the gradients: sums of 15 products of numbers of the leaf's dtype, or one number rounded to it.
RELATIVE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}

call_by_either_way = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def upstream(y):
    """A gradient of the output with no pattern in it, the same for every dtype."""
    draw = torch.Generator().manual_seed(9)
    return ((torch.randn(y.shape, generator=draw) * 8).round() / 8).to(y.dtype).to(y.device)


def gradients(call, sample):
    """The gradients of the leaves that require one, by name, and those that others got."""
    y = call(*sample)
    y.backward(upstream(y))
    tensors = {name: t for name, t in sample._asdict().items() if isinstance(t, torch.Tensor)}
    assert all((t.grad is not None) == t.requires_grad for t in tensors.values())
    return {name: t.grad for name, t in tensors.items() if t.grad is not None}


def in_float64(sample):
    return Norm(*(t.double() if isinstance(t, torch.Tensor) else t for t in sample))


def assert_gradients_match_float64(call, sample, names, view=lambda x: x):
    """Those of the leaves in `names`, with a view of the input as what is normalized."""

    def of_view(function):
        return lambda x, *others: function(view(x), *others)

    got = gradients(of_view(call), leaves(sample, *names))
    expected = gradients(of_view(F.layer_norm), leaves(in_float64(sample), *names))
    assert list(got) == list(expected) == [name for name in TENSORS if name in names]
    for name, grad in got.items():
        leaf = getattr(sample, name)
        assert (grad.shape, grad.dtype, grad.device) == (leaf.shape, leaf.dtype, leaf.device)
        # A gradient is at best as good as its own dtype, and as the output that was rounded to the input's.
        relative = max(RELATIVE[leaf.dtype], RELATIVE[sample.input.dtype])
        atol = relative * expected[name].abs().max().item()
        torch.testing.assert_close(grad.double(), expected[name], rtol=relative, atol=atol)


@each()
@call_by_either_way
@pytest.mark.parametrize("names", SUBSETS, ids="_".join)
def test_case_31_exactly_the_gradients_asked_for_and_they_are_right(names, call, dtype, device):
    for shape, dims in (((3, 5, 33), 1), ((15, 768), 1), ((15, 4, 8), 2)):
        assert_gradients_match_float64(call, norm_inputs(dtype, device, shape, dims=dims), names)


@pytest.mark.parametrize("mixture", MIXTURES)
@call_by_either_way
def test_gradients_of_mixed_dtypes_come_in_the_dtypes_of_their_leaves(mixture, call, device):
    x, weight, bias = MIXTURES[mixture]
    sample = norm_inputs(x, device, (15, 33)).in_dtypes(weight, bias)
    for names in SUBSETS:
        assert_gradients_match_float64(call, sample, names)


@call_by_either_way
def test_gradients_with_one_parameter_or_none(call, device):
    sample = norm_inputs(torch.float32, device, (15, 33))
    for form in (sample._replace(weight=None), sample._replace(bias=None), sample.in_dtypes(None, None)):
        names = [name for name in TENSORS if getattr(form, name) is not None]
        assert_gradients_match_float64(call, form, names)


@call_by_either_way
def test_gradients_of_strided_inputs(call, device):
    sample = norm_inputs(torch.float32, device, (15, 33))
    views = (
        ((33, 15), lambda x: x.t()),
        ((15, 66), lambda x: x[:, ::2]),
        ((15, 40), lambda x: x[:, 1:34]),
        ((1, 33), lambda x: x.expand(15, 33)),
        ((3, 5, 33), lambda x: x.transpose(0, 1)),
    )
    for shape, view in views:
        x = norm_inputs(torch.float32, device, shape).input
        assert_gradients_match_float64(call, sample.of(x), TENSORS, view)


@call_by_either_way
def test_values_under_autograd_match_float64(call, device):
    for x, weight, bias in ((torch.float32,) * 3, *MIXTURES.values()):
        sample = norm_inputs(x, device, (15, 33)).in_dtypes(weight, bias)
        assert_norm_matches_float64(call(*leaves(sample, *TENSORS)).detach(), sample)


@pytest.mark.parametrize("names", [("input",), ("weight", "bias"), TENSORS], ids="_".join)
@call_by_either_way
def test_compiled_gradients_are_those_of_eager(call, names, device, fresh_compiler):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)
    for dtypes in ((torch.float32,) * 3, MIXTURES["float16_with_float32"]):
        sample = norm_inputs(dtypes[0], device, (15, 33)).in_dtypes(*dtypes[1:])
        assert_gradients_match_float64(compiled, sample, names)


@call_by_either_way
@pytest.mark.parametrize(
    "present", [(), ("weight",), ("bias",), ("weight", "bias")], ids=lambda p: "_".join(p) or "none"
)
def test_case_29_second_derivatives_are_right(call, present, device):
    sample = leaves(norm_inputs(torch.float64, device, (2, 5)), "input", *present)
    tensors = [getattr(sample, name) for name in ("input", *present)]

    def function(x, *parameters):
        by_name = dict(zip(present, parameters, strict=True))
        return call(x, [5], by_name.get("weight"), by_name.get("bias"))

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@call_by_either_way
def test_func_grad_is_right(call, device):
    sample = norm_inputs(torch.float64, device, (3, 33))

    def loss(function):
        return lambda x, weight, bias: function(x, [33], weight, bias).pow(3).sum()

    tensors = [getattr(sample, name) for name in TENSORS]
    ours, theirs = (torch.func.grad(loss(f), argnums=(0, 1, 2))(*tensors) for f in (call, F.layer_norm))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@call_by_either_way
def test_forward_mode_never_drops_a_tangent(call, mode, device):
    """It is right, or it raises."""
    sample = norm_inputs(torch.float64, device, (3, 33))
    tangent = norm_inputs(torch.float64, device, (3, 33), seed=1).input

    def tangent_of(function):
        with mode(), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(sample.input, tangent)
            return torch.autograd.forward_ad.unpack_dual(function(*sample.of(dual))).tangent

    expected = tangent_of(F.layer_norm)
    try:
        got = tangent_of(call)
    except (RuntimeError, NotImplementedError):
        return
    assert got is not None
    torch.testing.assert_close(got, expected)


@call_by_either_way
def test_func_jvp_never_drops_a_tangent(call, device):
    """It is right, or it raises."""
    x = norm_inputs(torch.float64, device, (3, 33)).input

    def tangent_of(function):
        return torch.func.jvp(lambda t: function(t, [33]), (x,), (x.square(),))[1]

    try:
        got = tangent_of(call)
    except (RuntimeError, NotImplementedError):
        return
    torch.testing.assert_close(got, tangent_of(F.layer_norm))


# ------------------------------------------------------------------------------------ layer_norm_fwd


def statistics(x, dims, eps):
    """mean and rstd in ops that torch differentiates any number of times."""
    mean = x.mean(dims, keepdim=True)
    return mean, ((x - mean).square().mean(dims, keepdim=True) + eps).rsqrt()


def written_out(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """What layer_norm_fwd returns, in such ops."""
    mean, rstd = statistics(x, tuple(range(-len(normalized_shape), 0)), eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, rstd


OUTPUTS = [outputs for n in (1, 2, 3) for outputs in itertools.combinations(range(3), n)]


@pytest.mark.parametrize("outputs", OUTPUTS, ids=str)
@pytest.mark.parametrize("names", SUBSETS, ids="_".join)
def test_every_output_of_layer_norm_fwd_has_its_gradient(names, outputs, device):
    """mean and rstd too, of which torch's own leaves the gradient out."""
    sample = norm_inputs(torch.float64, device, (3, 4, 5), dims=2)

    def grads(function):
        leaf = leaves(sample, *names)
        chosen = [(y * upstream(y)).sum() for i, y in enumerate(function(*leaf)) if i in outputs]
        tensors = [getattr(leaf, name) for name in names]
        if not any(y.requires_grad for y in chosen):
            return [None] * len(tensors)
        return torch.autograd.grad(sum(chosen), tensors, allow_unused=True)

    for got, expected in zip(grads(FWD), grads(written_out), strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(zero if got is None else got, zero if expected is None else expected)


@pytest.mark.parametrize("dtypes", MIXTURES.values(), ids=MIXTURES)
def test_gradients_of_layer_norm_fwd_of_mixed_dtypes_are_those_of_layer_norm(dtypes, device):
    sample = norm_inputs(dtypes[0], device, (15, 33)).in_dtypes(*dtypes[1:])
    got = gradients(lambda *arguments: FWD(*arguments)[0], leaves(sample, *TENSORS))
    expected = gradients(fastln.layer_norm, leaves(sample, *TENSORS))
    assert all(same_bits(got[name], expected[name]) for name in TENSORS)


@pytest.mark.parametrize("present", [(), ("weight",), ("weight", "bias")], ids=lambda p: "_".join(p) or "none")
def test_second_derivatives_of_layer_norm_fwd_are_right(present, device):
    sample = leaves(norm_inputs(torch.float64, device, (2, 5)), "input", *present)
    tensors = [getattr(sample, name) for name in ("input", *present)]

    def function(x, *parameters):
        by_name = dict(zip(present, parameters, strict=True))
        return FWD(x, [5], by_name.get("weight"), by_name.get("bias"), 1e-5)

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_torch_func_and_forward_mode_differentiate_layer_norm_fwd(device):
    sample = norm_inputs(torch.float64, device, (3, 5))

    def loss(function):
        return lambda x: sum(t.sin().sum() for t in function(*sample.of(x)))

    def third(function):
        grad = torch.func.grad
        return lambda x: grad(lambda x: grad(lambda x: grad(function)(x).sum())(x).pow(2).sum())(x)

    def tangents(function):
        def of(x):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, x.cos())
                outputs = function(*sample.of(dual))
                return tuple(torch.autograd.forward_ad.unpack_dual(t).tangent for t in outputs)

        return of

    x = sample.input
    torch.testing.assert_close(torch.func.grad(loss(FWD))(x), torch.func.grad(loss(written_out))(x))
    torch.testing.assert_close(third(loss(FWD))(x), third(loss(written_out))(x))
    torch.testing.assert_close(tangents(FWD)(x), tangents(written_out)(x))
    jvps = [torch.func.jvp(lambda x, f=f: f(*sample.of(x)), (x,), (x.cos(),))[1] for f in (FWD, written_out)]
    torch.testing.assert_close(*jvps)


def test_derivatives_by_something_else_leave_layer_norm_fwd_and_bwd_alone(device):
    """The ops that have no rule for a derivative refuse only where it is taken through them."""
    sample = norm_inputs(torch.float32, device, (3, 5))
    expected = FWD(*sample)
    dx = torch.ops.fastln.layer_norm_bwd(
        sample.input, sample.input, [5], *expected[1:], None, None, [True, False, False]
    )

    def calls(_):
        fwd = FWD(*sample)
        bwd = torch.ops.fastln.layer_norm_bwd(
            sample.input, sample.input, [5], *fwd[1:], None, None, [True, False, False]
        )
        return (*fwd, bwd[0])

    w = torch.ones(1, device=device)
    with torch.autograd.forward_ad.dual_level():
        torch.autograd.forward_ad.make_dual(w, w)
        assert all(map(same_bits, calls(w), (*expected, dx[0])))
    by_grad = torch.func.grad(lambda w: (sum(t.sum() for t in calls(w)) * w).sum())(w)
    torch.testing.assert_close(by_grad, sum(t.sum() for t in calls(w)).view(1))
    tangent = torch.func.jvp(lambda w: calls(w)[-1] * w, (w,), (w,))[1]
    torch.testing.assert_close(tangent, dx[0])


@pytest.mark.parametrize("call", [*CALLS.values(), lambda *a: FWD(*a)[0]], ids=[*CALLS, "fwd"])
def test_a_graph_captured_in_grad_mode_trains(call, device):
    """As one that holds torch's own layer norm does: make_fx traces below autograd."""
    sample = leaves(norm_inputs(torch.float32, device, (15, 33)), *TENSORS)

    def function(x, weight, bias):
        return call(x, [33], weight, bias, 1e-5) * 2

    tensors = [getattr(sample, name) for name in TENSORS]
    graph = make_fx(function)(*tensors)
    y = graph(*tensors)
    grads = torch.autograd.grad(y, tensors, upstream(y))
    expected = torch.autograd.grad(function(*tensors), tensors, upstream(y))
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


# --------------------------------------------------------------------------------------- grad modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@call_by_either_way
def test_grad_modes_without_grad_give_the_bits_of_tensors_without_it(call, mode, device):
    sample = norm_inputs(torch.float16, device, (3, 33))
    expected, differentiable = call(*sample), leaves(sample, *TENSORS)
    with mode():
        y = call(*differentiable)
        assert same_bits(call(*sample), expected)
    assert same_bits(y, expected)
    assert not y.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)


@call_by_either_way
def test_inference_tensors_are_taken_in_every_mode(call, device):
    with torch.inference_mode():
        sample = norm_inputs(torch.float16, device, (3, 33))
        expected = call(*sample)
    assert same_bits(call(*sample), expected)
    with torch.no_grad():
        assert same_bits(call(*sample), expected)


@call_by_either_way
def test_output_requires_grad_only_where_an_argument_does(call, device):
    sample = norm_inputs(torch.float32, device, (3, 33))
    assert not call(*sample).requires_grad
    for name in TENSORS:
        y = call(*leaves(sample, name))
        assert y.requires_grad
        assert not y.is_leaf


def test_module_parameters_cost_nothing_without_grad(device):
    """nn.Parameter requires grad; under no_grad the result is the plain kernel's all the same."""
    sample = norm_inputs(torch.float16, device, (3, 768))
    weight, bias = torch.nn.Parameter(sample.weight), torch.nn.Parameter(sample.bias)
    with torch.no_grad():
        assert same_bits(fastln.layer_norm(sample.input, [768], weight, bias), fastln.layer_norm(*sample))
