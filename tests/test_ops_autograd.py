"""Grad modes: inference costs nothing, and a derivative that is not there raises instead of being zero."""

import pytest
import torch
from reference import call_out, same_bits, sample_inputs

OVERLOADS = {
    "default": lambda kernel, x, w, b: kernel.op(x, w, b),
    "scalar": lambda kernel, x, w, b: kernel.op.scalar(x, 1.5, 0.5),
}
PARAMETERS = ("input", "weight", "bias")


def with_grad(kernel, device, *names):
    """Sample inputs of which those in `names` require grad."""
    sample = sample_inputs(kernel, device, (3, 33))
    return [t.detach().requires_grad_(name in names) for name, t in zip(PARAMETERS, sample[:3], strict=True)]


def no_backward(kernel):
    return pytest.raises(RuntimeError, match=kernel.qualname)


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_has_the_same_bits_without_grad(kernel, overload, mode, device):
    arguments = with_grad(kernel, device, *PARAMETERS)
    expected = OVERLOADS[overload](kernel, *arguments)
    with mode():
        y = OVERLOADS[overload](kernel, *arguments)
    assert same_bits(y, expected.detach())
    assert not y.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)


def test_inference_tensors_are_taken_in_every_mode(kernel, device):
    with torch.inference_mode():
        sample = sample_inputs(kernel, device, (3, 33))
        expected = kernel.op(*sample)
        assert same_bits(call_out(kernel, sample), expected)
    assert same_bits(kernel.op(*sample), expected)
    with torch.no_grad():
        assert same_bits(kernel.op(*sample), expected)
        assert same_bits(call_out(kernel, sample, torch.empty_like(expected)), expected)


def test_output_requires_grad_only_where_an_input_does(kernel, device):
    assert not kernel.op(*with_grad(kernel, device)).requires_grad
    for name in PARAMETERS:
        y = kernel.op(*with_grad(kernel, device, name))
        assert y.requires_grad and not y.is_leaf


@pytest.mark.parametrize("names", [("input",), ("weight",), ("bias",), PARAMETERS])
def test_backward_raises_instead_of_giving_zeros(kernel, names, device):
    arguments = with_grad(kernel, device, *names)
    y = kernel.op(*arguments)
    assert same_bits(y.detach(), kernel.op(*(t.detach() for t in arguments)))
    with no_backward(kernel):
        y.sum().backward()
    assert all(t.grad is None for t in arguments)


def test_backward_of_the_scalar_overload_raises(kernel, device):
    x = with_grad(kernel, device, "input")[0]
    y = kernel.op.scalar(x, 1.5, 0.5)
    assert same_bits(y.detach(), kernel.op.scalar(x.detach(), 1.5, 0.5))
    with no_backward(kernel):
        y.sum().backward()
    assert x.grad is None


def test_torch_autograd_grad_raises_instead_of_giving_none(kernel, device):
    x, weight, bias = with_grad(kernel, device, *PARAMETERS)
    with no_backward(kernel):
        torch.autograd.grad(kernel.op(x, weight, bias).sum(), (x, weight, bias), allow_unused=True)


def test_backward_raises_in_the_middle_of_a_graph(kernel, device):
    x = with_grad(kernel, device, "input")[0]
    with no_backward(kernel):
        (kernel.op(x * 2) * 3).sum().backward()
    assert x.grad is None


def assert_compiled_backward_raises(kernel, overload):
    arguments = with_grad(kernel, "cpu", "input")
    compiled = torch.compile(
        lambda x, w, b: OVERLOADS[overload](kernel, x * 2, w, b) * 3, fullgraph=True, backend="aot_eager"
    )
    with no_backward(kernel):
        compiled(*arguments).sum().backward()
    assert arguments[0].grad is None


def test_backward_raises_in_compiled_mode(kernel, fresh_compiler):
    assert_compiled_backward_raises(kernel, "default")


@pytest.mark.kernels(items=8, access=8)
def test_backward_of_the_scalar_overload_raises_in_compiled_mode(kernel, fresh_compiler):
    assert_compiled_backward_raises(kernel, "scalar")


@pytest.mark.parametrize("overload", OVERLOADS)
def test_func_grad_raises_instead_of_giving_zeros(kernel, overload):
    x, weight, bias = with_grad(kernel, "cpu")
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda t: OVERLOADS[overload](kernel, t, weight, bias).square().sum())(x)


@pytest.mark.parametrize("overload", OVERLOADS)
def test_func_jvp_raises_instead_of_giving_zeros(kernel, overload):
    x, weight, bias = with_grad(kernel, "cpu")
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda t: OVERLOADS[overload](kernel, t, weight, bias), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("overload", OVERLOADS)
def test_forward_mode_raises_instead_of_dropping_the_tangent(kernel, overload):
    x, weight, bias = with_grad(kernel, "cpu")
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError):
        OVERLOADS[overload](kernel, torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), weight, bias)


@pytest.mark.parametrize("name", [*PARAMETERS, "out"])
def test_out_overload_refuses_an_argument_that_requires_grad(kernel, name, device):
    x, weight, bias = with_grad(kernel, device, name)
    out = torch.full((3, 33), 7.0, dtype=kernel.dtype, device=device, requires_grad=name == "out")
    with pytest.raises(RuntimeError, match=f"{kernel.qualname}.*grad"):
        kernel.op.out(x, weight, bias, out=out)
    assert (out == 7.0).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_out_overload_takes_parameters_that_require_grad_without_grad_mode(kernel, mode, device):
    arguments = with_grad(kernel, device, *PARAMETERS)
    expected = kernel.op(*arguments).detach()
    with mode():
        out = torch.empty_like(expected)
        kernel.op.out(*arguments, out=out)
    assert same_bits(out, expected)
