"""What ``torch.func.vmap`` makes of our ops: one call for a batch of inputs, one a slice for a batch of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastln._library import KERNELS


def _register(op: torch._ops.OpOverload) -> None:
    """``op`` normalizes the rows of its first argument, whatever dimensions lead there."""

    def rule(info: Any, in_dims: tuple[Any, ...], input: Tensor, *others: Any) -> tuple[Any, Any]:
        input_dim, *other_dims = in_dims
        if not any(isinstance(dim, int) for dim in other_dims):
            out = op(input.movedim(input_dim, 0), *others)
        else:
            # Of no slices one is made up, of which nothing is kept.
            slices = [
                op(*(_slice(argument, dim, i) for argument, dim in zip((input, *others), in_dims, strict=True)))
                for i in range(max(info.batch_size, 1))
            ]
            out = torch.utils._pytree.tree_map(lambda *parts: torch.stack(parts)[: info.batch_size], *slices)
        return out, 0 if isinstance(out, Tensor) else (0,) * len(out)

    torch.library.register_vmap(op, rule, lib=_registrations)


def _slice(argument: Any, dim: Any, index: int) -> Any:
    if not isinstance(dim, int):
        return argument
    if argument.shape[dim] == 0:
        return argument.new_zeros([*argument.shape[:dim], *argument.shape[dim + 1 :]])
    return argument.select(dim, index)


# Registrations live as long as the Library object that made them.
_registrations = torch.library.Library("fastln", "IMPL")
for _op in (torch.ops.fastln.layer_norm.default, torch.ops.fastln.layer_norm_fwd.default):
    _register(_op)
for _kernel in KERNELS:
    _register(_kernel.op.default)
    _register(_kernel.op.scalar)
