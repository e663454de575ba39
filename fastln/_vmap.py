"""What ``torch.func.vmap`` makes of our ops: one call for a batch of inputs, one a slice for a batch of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastln._library import KERNELS, registrations


def _register(op: torch._ops.OpOverload) -> None:
    """``op`` normalizes the rows of its first argument, whatever dimensions lead there."""

    def rule(info: Any, in_dims: tuple[Any, ...], input: Tensor, *others: Any) -> tuple[Any, Any]:
        input_dim, *other_dims = in_dims
        if not any(isinstance(dim, int) for dim in other_dims):
            out = op(input.movedim(input_dim, 0), *others)
        else:
            out = _slice_by_slice(op, info.batch_size, in_dims, (input, *others))
        return out, 0 if isinstance(out, Tensor) else (0,) * len(out)

    torch.library.register_vmap(op, rule, lib=registrations)


def _register_bwd(op: torch._ops.OpOverload) -> None:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        grad_out, input, normalized_shape, mean, rstd, weight, bias, mask = args
        if tuple(mask) == (True, False, False) and not any(isinstance(dim, int) for dim in in_dims[5:7]):
            # The gradient of the input is one of rows, whatever dimensions lead there.
            over_rows = zip((grad_out, input, mean, rstd), (*in_dims[:2], *in_dims[3:5]), strict=True)
            grad_out, input, mean, rstd = (_to_front(t, dim, info.batch_size) for t, dim in over_rows)
            out = op(grad_out, input, normalized_shape, mean, rstd, weight, bias, mask)
        else:
            out = _slice_by_slice(op, info.batch_size, in_dims, args)
        return out, tuple(None if t is None else 0 for t in out)

    torch.library.register_vmap(op, rule, lib=registrations)


def _slice_by_slice(op: torch._ops.OpOverload, size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """The outputs of a call a slice, one behind the other; None for those that are None."""
    # Of no slices one is made up, of which nothing is kept.
    slices = [
        op(*(_slice(argument, dim, i) for argument, dim in zip(args, in_dims, strict=True)))
        for i in range(max(size, 1))
    ]
    if isinstance(slices[0], Tensor):
        return torch.stack(slices)[:size]
    outputs = zip(*slices, strict=True)
    return tuple(None if parts[0] is None else torch.stack(parts)[:size] for parts in outputs)


def _to_front(tensor: Tensor, dim: Any, size: int) -> Tensor:
    return tensor.movedim(dim, 0) if isinstance(dim, int) else tensor.expand(size, *tensor.shape)


def _slice(argument: Any, dim: Any, index: int) -> Any:
    if not isinstance(dim, int):
        return argument
    if argument.shape[dim] == 0:
        return argument.new_zeros([*argument.shape[:dim], *argument.shape[dim + 1 :]])
    return argument.select(dim, index)


for _op in (torch.ops.fastln.layer_norm.default, torch.ops.fastln.layer_norm_fwd.default):
    _register(_op)
_register_bwd(torch.ops.fastln.layer_norm_bwd.default)
for _kernel in KERNELS:
    _register(_kernel.op.default)
    _register(_kernel.op.scalar)
