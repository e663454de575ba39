"""torch.jit.trace of code that calls fastln.layer_norm: the graph holds the public op, trains, and can be saved."""

import io

import pytest
import torch
from norm_support import norm_inputs
from reference import same_bits
from torch import nn

import fastln

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Model(nn.Module):
    """Calls the function, as a module that is not fastln.LayerNorm does."""

    def __init__(self, device):
        super().__init__()
        sample = norm_inputs(torch.float32, device, (5, 33))
        self.weight, self.bias = nn.Parameter(sample.weight), nn.Parameter(sample.bias)

    def forward(self, x):
        return fastln.layer_norm(x, [33], self.weight, self.bias) * 2


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_traced_module_is_saved_with_the_public_op_and_trains(mode, device):
    model = Model(device)
    x = norm_inputs(torch.float32, device, (5, 33)).input
    with mode():
        traced = torch.jit.trace(model, x)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert [kind for kind in kinds if "fastln" in kind or "Python" in kind] == ["fastln::layer_norm"]
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    other = norm_inputs(torch.float32, device, (7, 33), seed=1).input
    for module in (traced, torch.jit.load(file)):
        leaf = other.clone().requires_grad_()
        y = module(leaf)
        assert same_bits(y.detach(), model(other).detach())
        (got,) = torch.autograd.grad(y.sin().sum(), leaf)
        again = other.clone().requires_grad_()
        (expected,) = torch.autograd.grad(model(again).sin().sum(), again)
        assert same_bits(got, expected)


def test_a_traced_function_takes_any_number_of_rows(device):
    sample = norm_inputs(torch.float32, device, (5, 33))
    traced = torch.jit.trace(lambda x: fastln.layer_norm(*sample.of(x)), sample.input)
    x = norm_inputs(torch.float32, device, (9, 33), seed=1).input
    assert same_bits(traced(x), fastln.layer_norm(*sample.of(x)))
