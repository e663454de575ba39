"""torch.autocast as ``F.layer_norm`` has it: float32 on CUDA, nothing on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_KEY = torch._C.DispatchKey.AutocastCUDA


def _eligible(t: Tensor) -> bool:
    return t.dtype not in (torch.float32, torch.float64) and t.is_cuda and t.is_floating_point()


def _cast(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return (
        input.float() if _eligible(input) else input,
        weight.float() if weight is not None and _eligible(weight) else weight,
        bias.float() if bias is not None and _eligible(bias) else bias,
    )


def autocast_arguments(
    input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The three as autocast wants them, if it is on for CUDA."""
    return _cast(input, weight, bias) if torch.is_autocast_enabled("cuda") else (input, weight, bias)


def _register(op: torch._ops.OpOverload) -> None:
    def kernel(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> object:
        input, weight, bias = _cast(input, weight, bias)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return op(input, normalized_shape, weight, bias, eps)

    _registrations.impl(op, kernel, "AutocastCUDA")
    op.py_impl(_KEY)(kernel)


# Registrations live as long as the Library object that made them. Autocast has none of its own for these ops, so
# they cost nothing while it is off.
_registrations = torch.library.Library("fastln", "IMPL")
for _op in (torch.ops.fastln.layer_norm.default, torch.ops.fastln.layer_norm_fwd.default):
    _register(_op)
