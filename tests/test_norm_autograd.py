"""Gradients of fastln.layer_norm, and what the grad modes leave of its cost and of its bits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from bwd_support import MIXTURES, TENSORS, leaves
from norm_support import CALLS, FWD, Norm, assert_norm_matches_float64, each, norm_inputs
from reference import same_bits

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


def test_a_gradient_through_layer_norm_fwd_is_right_or_refused(device):
    """Also where it is one of several ways to the input, so that a part left out would go unnoticed."""

    def residual(function):
        return lambda x, *others: function(x, *others) + x

    sample = norm_inputs(torch.float32, device, (15, 33))
    expected = gradients(residual(F.layer_norm), leaves(sample, *TENSORS))
    try:
        got = gradients(residual(lambda *arguments: FWD(*arguments)[0]), leaves(sample, *TENSORS))
    except RuntimeError:
        return
    for name, grad in got.items():
        torch.testing.assert_close(grad, expected[name])


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
