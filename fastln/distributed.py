"""How DTensor shards our ops.

Rows are independent: the input may be sharded over any dimension that is not normalized, evenly or not, as sequence
parallelism and data parallelism do it, and so are the output, mean, rstd and the input's gradient. Weight and bias are
replicated, and their gradients are partial sums over the shards. Any other placement, a sharded last dimension or a
partial sum for one, is redistributed first. Where to, the rule of ``F.layer_norm`` says: a converted model has the same
local shapes.

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
from collections.abc import Callable, Sequence
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
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    propagator = DTensor._op_dispatcher.sharding_propagator

    def spec_of(argument: Any) -> Any:
        return argument.strategies[0].output_spec

    def rows_of(tensors: dict[int, Any], row_dims: int, input: int, weight: int) -> tuple[Any, ...]:
        """How ``F.layer_norm`` in this torch places its output for arguments placed so.

        Whoever converts a model must get the same local shapes, and what torch does where the input is a partial sum
        differs between its versions: so torch is asked.
        """

        def as_float(position: int) -> Any:
            if position not in tensors:
                return None
            spec = spec_of(tensors[position])
            # Of one dtype, as aten takes fewer combinations than we do.
            meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, torch.float32)
            return spec.shallow_copy_with_tensor_meta(meta)

        shape = spec_of(tensors[input]).tensor_meta.shape
        row = list(shape[len(shape) - row_dims :])
        arguments = (as_float(input), row, as_float(weight), as_float(weight + 1), 1e-5)
        schema = OpSchema(torch.ops.aten.native_layer_norm.default, arguments, {})
        answer: Any = propagator.propagate_op_sharding_non_cached(schema)
        return tuple(answer.output_spec[0].placements)

    def sharded(
        arguments: Sequence[Any], row_dims: int, over_rows: Sequence[int], weight: int, returns: Sequence[str]
    ) -> Any:
        """The one strategy there is for arguments placed as they are.

        ``over_rows`` are the positions of the arguments that have the rows of the input, itself first; ``weight`` that
        of the weight, and the bias follows it. ``returns`` are ``"rows"``, ``"sum"`` over the rows, or ``"none"``.
        """
        tensors = {i: argument for i, argument in enumerate(arguments) if isinstance(argument, OpStrategy)}
        mesh = spec_of(tensors[over_rows[0]]).mesh
        rows = rows_of(tensors, row_dims, over_rows[0], weight)
        whole = (Replicate(),) * len(rows)
        placed = {"rows": rows, "sum": tuple(p if p.is_replicate() else Partial() for p in rows)}
        outputs = tuple(DTensorSpec(mesh, placed[name]) if name in placed else None for name in returns)
        inputs = [
            DTensorSpec(mesh, rows if i in over_rows else whole, tensor_meta=spec_of(tensor).tensor_meta)
            for i, tensor in tensors.items()
        ]
        costs = [generate_redistribute_costs(*pair) for pair in zip(tensors.values(), inputs, strict=True)]
        return OpStrategy([OpSpec(outputs if len(outputs) > 1 else outputs[0], inputs, costs)])

    def layer_norm(arguments: Sequence[Any]) -> Any:
        return sharded(arguments, len(arguments[1]), (0,), 2, ["rows"])

    def layer_norm_fwd(arguments: Sequence[Any]) -> Any:
        return sharded(arguments, len(arguments[1]), (0,), 2, ["rows"] * 3)

    def layer_norm_bwd(arguments: Sequence[Any]) -> Any:
        dx, dweight, dbias = arguments[7]
        returns = ["rows" if dx else "none", "sum" if dweight else "none", "sum" if dbias else "none"]
        return sharded(arguments, len(arguments[2]), (1, 0, 3, 4), 5, returns)

    def named(arguments: Sequence[Any]) -> Any:
        return sharded(arguments, 1, (0,), 1, ["rows"])

    def strategy(rule: Callable[[Sequence[Any]], Any]) -> Callable[[Any], Any]:
        return lambda schema: rule(schema.args_schema)

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
    # How rows are sharded depends on normalized_shape and output_mask too, so DTensor must not remember the answer for
    # another one.
    asks = RuntimeSchemaInfo(static_argnum=1, needs_pytree=True)
    with _lock:
        if not _registered:
            for op, rule in overloads:
                propagator.register_op_strategy(op, strategy(rule), asks)
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
