"""Who runs in the layer_norm benchmark beside ``fastln.layer_norm``, and in which cells."""

from __future__ import annotations

import functools

import contenders
import torch
import torch.nn.functional as F
from cell_results import OURS, THEIRS
from lineup import Lineup
from norm_cells import BF16, F16, F32, Cell

import fastln
from fastln import _compare
from fastln._compare import Contender

#: What an output may be off by, over (1 + |reference|): two roundoffs of its dtype and some rounding of sums.
TOLERANCE = {F16: 2e-3, BF16: 1.6e-2, F32: 1e-5}


def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return fastln.layer_norm(x, x.shape[-1:], weight, bias, _compare.EPS)


def make_compiled(cell: Cell):
    """``torch.compile`` of ``F.layer_norm``, without what it learned from the shapes before."""
    torch._dynamo.reset()
    return torch.compile(_compare.baseline, dynamic=False, fullgraph=True)


def make_liger(cell: Cell):
    """Liger's LayerNorm, a Triton kernel; ImportError where liger-kernel is not installed."""
    apply = load_liger().LigerLayerNormFunction.apply

    def liger(x, weight, bias):
        return apply(x, weight, bias, _compare.EPS)

    return liger


@functools.cache
def load_liger():
    import liger_kernel.ops.layer_norm

    return liger_kernel.ops.layer_norm


LINEUP = Lineup(
    suite="layer_norm",
    factories={
        "copy": lambda cell: contenders.copy,
        THEIRS: lambda cell: _compare.baseline,
        "torch.compile": make_compiled,
        "Liger": make_liger,
        OURS: lambda cell: ours,
    },
    peers={
        "torch.compile": lambda cell: bool({"target", "few rows"} & set(cell.groups)),
        # In the sweep in float16 alone.
        "Liger": lambda cell: cell.dtype == F16 or bool({"target", "dtypes"} & set(cell.groups)),
    },
    rotation=lambda cell: contenders.workload(cell.shape, cell.dtype).rotation,
)


def make(name: str, cell: Cell) -> Contender:
    tolerance = 0.0 if name == LINEUP.floor else TOLERANCE[cell.dtype]
    return Contender(name, cell.dtype, "float32", LINEUP.factories[name](cell), tolerance, exact=name != LINEUP.floor)


def eager_call(contender: Contender, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple:
    """Function and arguments as a user writes them, without the Python functions of ours around them."""
    whole = x, x.shape[-1:], weight, bias, _compare.EPS
    if contender.name == THEIRS:
        return F.layer_norm, whole
    if contender.name == OURS:
        return fastln.layer_norm, whole
    if contender.name == "Liger":
        return load_liger().LigerLayerNormFunction.apply, (x, weight, bias, _compare.EPS)
    return contender.call, (x, weight, bias)
