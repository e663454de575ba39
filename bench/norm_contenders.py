"""Who runs in the layer_norm benchmark beside ``fastln.layer_norm``, and in which cells.

The peers need compilers of their own, so they run only where PEERS says. With FASTLN_BENCH_PEERS=all in
the environment they run in every cell, which takes minutes more.
"""

from __future__ import annotations

import functools
import os

import contenders
import torch
import torch.nn.functional as F
from norm_cells import BF16, F16, F32, Cell

import fastln
from fastln import _compare
from fastln._compare import Contender

OURS = "fastln.layer_norm"

#: What an output may be off by, over (1 + |reference|): two roundoffs of its dtype and some rounding of sums.
TOLERANCE = {F16: 2e-3, BF16: 1.6e-2, F32: 1e-5}


def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return fastln.layer_norm(x, x.shape[-1:], weight, bias, _compare.EPS)


def make_compiled():
    """``torch.compile`` of ``F.layer_norm``, without what it learned from the shapes before."""
    torch._dynamo.reset()
    return torch.compile(_compare.baseline, dynamic=False, fullgraph=True)


def make_liger():
    """Liger's LayerNorm, a Triton kernel; ImportError where liger-kernel is not installed."""
    apply = load_liger().apply

    def liger(x, weight, bias):
        return apply(x, weight, bias, _compare.EPS)

    return liger


@functools.cache
def load_liger() -> type[torch.autograd.Function]:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction


#: Makes the call of each contender, in the order in which they run. Ours is last: it is compared with the others.
FACTORIES = {
    "copy": lambda: contenders.copy,
    "F.layer_norm": lambda: _compare.baseline,
    "torch.compile": make_compiled,
    "Liger": make_liger,
    OURS: lambda: ours,
}

#: The groups of cells in which a peer runs. The sweep has Liger in float16 alone.
PEERS = {"torch.compile": {"target", "few rows"}, "Liger": {"target", "dtypes", "few rows", "odd"}}
EVERYWHERE = os.environ.get("FASTLN_BENCH_PEERS") == "all"


def names(cell: Cell) -> list[str]:
    """Who runs in this cell."""

    def runs(name: str) -> bool:
        if name not in PEERS or EVERYWHERE:
            return True
        return bool(PEERS[name] & set(cell.groups)) or (name == "Liger" and cell.dtype == F16)

    return [name for name in FACTORIES if runs(name)]


def kind(name: str) -> str:
    """What sort of row this is in the results: floor, torch, peer or op."""
    return {"copy": "floor", "F.layer_norm": "torch", OURS: "op"}.get(name, "peer")


def make(name: str, dtype: torch.dtype) -> Contender:
    tolerance = 0.0 if name == "copy" else TOLERANCE[dtype]
    return Contender(name, dtype, "float32", FACTORIES[name](), tolerance, exact=name != "copy")


def eager_call(contender: Contender, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple:
    """Function and arguments as a user writes them, without the Python functions of ours around them."""
    whole = x, x.shape[-1:], weight, bias, _compare.EPS
    if contender.name == "F.layer_norm":
        return F.layer_norm, whole
    if contender.name == OURS:
        return fastln.layer_norm, whole
    if contender.name == "Liger":
        return load_liger().apply, (x, weight, bias, _compare.EPS)
    return contender.call, (x, weight, bias)
