"""fastln.LayerNorm stands in for nn.LayerNorm."""

import inspect

import numpy as np
import pytest
import torch
from module_support import copies, pair
from norm_support import assert_norm_matches_float64, each, norm_inputs
from reference import same_bits
from shared import counting_backend
from torch import nn

import fastln

FORMS = {
    "affine": {},
    "no_bias": {"bias": False},
    "not_affine": {"elementwise_affine": False},
    "eps": {"eps": 1e-3},
}
forms = pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)


@forms
@each()
def test_output_matches_float64(options, dtype, device):
    for shape in ([33], [3, 16]):
        _, ours = pair(shape, device, dtype, **options)
        sample = norm_inputs(dtype, device, (5, *shape), dims=len(shape), eps=ours.eps)
        sample = sample._replace(weight=ours.weight, bias=ours.bias)
        with torch.no_grad():
            y = ours(sample.input)
            assert_norm_matches_float64(y, sample)
            assert same_bits(y, fastln.layer_norm(*sample))


@forms
def test_gradients_are_those_of_nn_layer_norm(options, device):
    stock, ours = pair(33, device, **options)
    grads = []
    for module in (stock, ours):
        x = norm_inputs(torch.float32, device, (5, 33)).input.requires_grad_()
        module(x).pow(3).sum().backward()
        grads.append([x.grad, *(p.grad for p in module.parameters())])
    for ours_grad, stock_grad in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(ours_grad, stock_grad, rtol=1e-5, atol=1e-4)


@forms
def test_has_the_attributes_of_nn_layer_norm(options):
    stock, ours = pair((3, 5), dtype=torch.float64, **options)
    assert isinstance(ours, nn.LayerNorm)
    assert repr(ours) == repr(stock)
    assert (ours.normalized_shape, ours.eps) == (stock.normalized_shape, stock.eps)
    assert ours.elementwise_affine == stock.elementwise_affine
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert all(p.dtype == torch.float64 for p in ours.parameters())


def test_starts_as_nn_layer_norm_does():
    ours, stock = fastln.LayerNorm(7), nn.LayerNorm(7)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True))
    assert fastln.LayerNorm(7, device="meta").weight.is_meta


@pytest.mark.parametrize("shape", [np.int64(8), np.prod((2, 4)), [np.int32(8)], (np.int64(2), 4)])
@pytest.mark.parametrize("eps", [np.float64(1e-3), np.float32(2**-10), 1e-3])
def test_numbers_of_numpy_become_those_of_python(shape, eps, fresh_compiler):
    """Dynamo takes NumPy's for arrays."""
    ours, stock = fastln.LayerNorm(shape, eps=eps), nn.LayerNorm(shape, eps=float(eps))
    assert [type(size) for size in ours.normalized_shape] == [int] * len(stock.normalized_shape)
    assert (ours.normalized_shape, ours.eps, type(ours.eps)) == (stock.normalized_shape, stock.eps, float)
    x = torch.randn(3, *stock.normalized_shape)
    backend, graphs = counting_backend()
    torch.testing.assert_close(torch.compile(ours, backend=backend, fullgraph=True)(x), stock(x))
    assert len(graphs) == 1


def test_has_the_signature_of_nn_layer_norm():
    ours, stock = (inspect.signature(kind).parameters.values() for kind in (fastln.LayerNorm, nn.LayerNorm))
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in stock]


@forms
def test_case_49_state_dict_loads_both_ways(options):
    stock, ours = pair(33, **options)
    assert list(ours.state_dict()) == list(stock.state_dict())
    for source, kind in ((ours, nn.LayerNorm), (stock, fastln.LayerNorm)):
        target = kind(33, **options)
        assert str(target.load_state_dict(source.state_dict(), strict=True)) == "<All keys matched successfully>"
        assert all(torch.equal(a, b) for a, b in zip(target.parameters(), source.parameters(), strict=True))


@copies
def test_case_51_copies_are_whole_and_separate(copied):
    _, ours = pair(33, eps=1e-3)
    ours.eval()
    other = copied(ours)
    assert type(other) is fastln.LayerNorm
    assert (other.eps, other.training) == (1e-3, False)
    x = norm_inputs(torch.float32, "cpu", (5, 33)).input
    assert same_bits(other(x), ours(x))
    with torch.no_grad():
        other.weight.zero_()
    assert ours.weight.abs().max() > 0


def test_takes_any_parameter_dtype_beside_a_half_input(device):
    _, ours = pair(33, device, torch.float32)
    x = norm_inputs(torch.float16, device, (5, 33)).input
    with torch.no_grad():
        y = ours(x)
    assert y.dtype == torch.float16
    sample = norm_inputs(torch.float16, device, (5, 33))._replace(weight=ours.weight, bias=ours.bias)
    assert_norm_matches_float64(y, sample)


def test_bad_input_is_refused_as_layer_norm_refuses_it():
    with pytest.raises(RuntimeError, match=r"^fastln::layer_norm: expected input whose last dimensions are .* \[33\]"):
        fastln.LayerNorm(33)(torch.randn(5, 32))


def test_works_in_functional_call_and_func_grad():
    stock, ours = pair(33)
    x = norm_inputs(torch.float32, "cpu", (5, 33)).input

    def loss(module):
        return lambda parameters: torch.func.functional_call(module, parameters, (x,)).square().sum()

    got, expected = (torch.func.grad(loss(m))(dict(m.named_parameters())) for m in (ours, stock))
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("translate", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(5, 33))])
def test_torchscript_gets_layer_norm_of_torch(translate):
    stock, ours = pair(33)
    x = norm_inputs(torch.float32, "cpu", (5, 33)).input
    scripted = translate(ours)
    assert same_bits(scripted(x).detach(), stock(x).detach())
    assert "fastln::" not in str(scripted.inlined_graph)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_torch_fx_traces_through_the_module(mode):
    """A proxy is no tensor; nn.LayerNorm, being of torch, is not looked into."""
    _, ours = pair(33)
    x = norm_inputs(torch.float32, "cpu", (5, 33)).input.requires_grad_()
    with mode():
        traced = torch.fx.symbolic_trace(nn.Sequential(ours))
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [fastln.layer_norm]
    assert same_bits(traced(x).detach(), ours(x).detach())
    assert traced(x).requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_get_layer_norm_of_torch(layout, device):
    stock, ours = pair(8, device)
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout, device=device)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            expected = stock(nested)
            for got in (ours(nested), fastln.layer_norm(nested, [8], ours.weight, ours.bias, ours.eps)):
                assert got.is_nested
                assert all(torch.equal(a, b) for a, b in zip(got.unbind(), expected.unbind(), strict=True))


def test_a_module_costs_one_op_without_grad(device):
    """Nothing is converted or copied on the way."""
    with torch.no_grad(), torch.profiler.profile() as profile:
        fastln.LayerNorm(33, device=device)(torch.randn(5, 33, device=device))
    ops = {event.name for event in profile.events() if event.name.startswith("fastln::")}
    assert ops == {"fastln::_layer_norm"}
