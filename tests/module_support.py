"""What the tests of fastln.LayerNorm and of conversion share."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fastln


def randomize(module, seed=0):
    """Gives every parameter random multiples of 1/64, which every dtype holds exactly; returns the module."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            values = (torch.randn(parameter.shape, generator=draw) * 64).round().clamp(-256, 256) / 64
            parameter.copy_(values)
    return module


def pair(shape, device="cpu", dtype=None, **options):
    """nn.LayerNorm with random parameters, and fastln.LayerNorm of the same arguments and state."""
    stock = randomize(nn.LayerNorm(shape, device=device, dtype=dtype, **options))
    ours = fastln.LayerNorm(shape, device=device, dtype=dtype, **options)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def through_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch_save": through_torch_save,
}
copies = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
