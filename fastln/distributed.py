"""How DTensor shards our ops.

Rows are independent: the input may be sharded over any dimension that is not normalized, as sequence parallelism
and data parallelism do it, and so are the output, mean and rstd. Weight and bias are replicated, and their gradients
are partial sums over the shards. Any other placement, a sharded last dimension for one, is redistributed first.

There is nothing to call. The rules are registered with DTensor as soon as both are imported; importing fastln alone
doesn't import ``torch.distributed.tensor``, which takes a second.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from fastln._library import KERNELS

_DTENSOR = "torch.distributed.tensor"
_lock = threading.Lock()
_registered = False


def register() -> None:
    """Registers the rules with DTensor, which it imports. Happens by itself; a second call does nothing.

    Raises:
        ImportError: This torch has no DTensor, or not the way to register rules that we know.
    """
    global _registered
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    def per_row(arguments: Sequence[Any], row_dims: int, over_rows: Sequence[int], returns: Sequence[str]) -> list[Any]:
        """What may be sharded how on one dimension of the mesh, as (placements of outputs, placements of arguments).

        ``over_rows`` are the positions of the arguments that have the rows of the first one; the other tensors are
        parameters. ``returns`` are ``"rows"``, ``"sum"`` over the rows, or ``"none"``.
        """
        tensors = [i for i, argument in enumerate(arguments) if hasattr(argument, "placements")]

        def pair(row: Any, total: Any) -> tuple[list[Any], list[Any]]:
            outputs = {"rows": row, "sum": total, "none": None}
            inputs = [(row if i in over_rows else Replicate()) if i in tensors else None for i in range(len(arguments))]
            return [outputs[name] for name in returns], inputs

        leading = range(arguments[over_rows[0]].ndim - row_dims)
        return [pair(Replicate(), Replicate()), *(pair(Shard(dim), Partial()) for dim in leading)]

    def layer_norm(*arguments: Any) -> list[Any]:
        return per_row(arguments, len(arguments[1]), (0,), ["rows"])

    def layer_norm_fwd(*arguments: Any) -> list[Any]:
        return per_row(arguments, len(arguments[1]), (0,), ["rows"] * 3)

    def layer_norm_bwd(*arguments: Any) -> list[Any]:
        dx, dweight, dbias = arguments[7]
        returns = ["rows" if dx else "none", "sum" if dweight else "none", "sum" if dbias else "none"]
        return per_row(arguments, len(arguments[2]), (0, 1, 3, 4), returns)

    def named(*arguments: Any) -> list[Any]:
        return per_row(arguments, 1, (0,), ["rows"])

    ops = torch.ops.fastln
    rules = {
        ops.layer_norm: layer_norm,
        ops._layer_norm: layer_norm,
        ops.layer_norm_fwd: layer_norm_fwd,
        ops._layer_norm_fwd: layer_norm_fwd,
        ops.layer_norm_bwd: layer_norm_bwd,
        ops._layer_norm_bwd: layer_norm_bwd,
    }
    overloads = [(packet.default, rule) for packet, rule in rules.items()]
    for kernel in KERNELS:
        for packet in (kernel.op, kernel.twin):
            overloads += [(packet.default, named), (packet.scalar, named)]
    with _lock:
        if not _registered:
            for op, rule in overloads:
                register_sharding(op)(rule)
                # Which shardings are good depends on normalized_shape and output_mask too. By itself, DTensor would
                # remember the answer for another one.
                DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(
                    static_argnum=1, needs_pytree=True
                )
            _registered = True


def _register_or_warn() -> None:
    try:
        register()
    except Exception as error:  # whoever imports DTensor may not even use our ops with it
        warnings.warn(f"fastln.distributed: no sharding rules under torch {torch.__version__}: {error!r}", stacklevel=2)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers the rules once somebody has imported DTensor."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _DTENSOR or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _register_or_warn()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _DTENSOR in sys.modules:
    _register_or_warn()
else:
    sys.meta_path.insert(0, _AfterImport())
