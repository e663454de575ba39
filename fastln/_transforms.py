"""What is under way around a call: derivatives beside plain ``backward()``, which an op without a rule for one must not
ignore, and modes that look on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

_DERIVATIVES = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)

in_functorch = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is under way; cheap."""

dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
"""How many modes, such as FakeTensorMode, see this thread's ops; cheap. None where a later torch does not say."""


def in_dual_level() -> bool:
    """Whether there may be dual tensors at all, those of forward-mode differentiation; cheap."""
    return forward_ad._current_level >= 0


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether any of ``tensors`` carries a tangent."""
    return in_dual_level() and any(
        t is not None and forward_ad.unpack_dual(t, level=forward_ad._current_level).tangent is not None
        for t in tensors
    )


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is to record an op of ``tensors``, also where vmap hides that they require grad."""
    return torch.is_grad_enabled() and any(t is not None and _innermost(t).requires_grad for t in tensors)


def in_derivative() -> bool:
    """Whether forward-mode differentiation, or a transform of torch.func that differentiates, is under way."""
    if in_dual_level():
        return True
    return in_functorch() and any(level.key() in _DERIVATIVES for level in _functorch.get_interpreter_stack())


def _innermost(tensor: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
