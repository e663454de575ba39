"""torch's own layer norm of tensors with the negative bit, while the Python dispatcher traces.

The kernels of ``src/bindings_autograd.cpp`` stand behind aten's two ops for such tensors, and know sizes as plain
integers alone: a graph that they helped to trace would be one for a single size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEY = torch._C.DispatchKey.Negative


def _register(op: torch._ops.OpOverload) -> None:
    def kernel(*args: object) -> object:
        resolved = [torch.resolve_neg(a) if isinstance(a, Tensor) else a for a in args]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return op(*resolved)

    if _KEY not in op.py_kernels:  # a later torch may have one
        op.py_impl(_KEY)(kernel)


for _op in (torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_layer_norm_backward.default):
    _register(_op)
