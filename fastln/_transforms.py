"""What is under way around a call: which derivatives, and which modes that look on.

All questions about derivatives stand here. Plain ``backward()`` is recorded by an op; every other kind an op without a
rule for it must not ignore, as it would then pass for zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch._guards import TracingContext
from torch.autograd import forward_ad

_GRAD, _JVP = _functorch.TransformType.Grad, _functorch.TransformType.Jvp

in_functorch = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is under way; cheap."""

dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
"""How many modes, such as FakeTensorMode, see this thread's ops; cheap. None where a later torch does not say."""

_modes_before_dispatch = getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", None)


def in_pre_dispatch() -> bool:
    """Whether make_fx is capturing ops as they are called, before autograd. A mode of ``__torch_function__`` is in
    force then too."""
    return _modes_before_dispatch is not None and _modes_before_dispatch() > 0


def in_dual_level() -> bool:
    """Whether there may be dual tensors at all, those of forward-mode differentiation; cheap."""
    return forward_ad._current_level >= 0


def needs_backward(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> bool:
    """Whether autograd is to record a call with these; outside transforms, and cheaper than ``requires_grad``."""
    return torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is to record an op of ``tensors``, also where vmap hides that they require grad."""
    return torch.is_grad_enabled() and any(t is not None and _innermost(t).requires_grad for t in tensors)


def in_derivative() -> bool:
    """Whether forward-mode differentiation, or a transform of torch.func that differentiates, is under way: by
    whatever, so that it may not concern a call at all."""
    if in_dual_level():
        return True
    return in_functorch() and any(level.key() in (_GRAD, _JVP) for level in _functorch.get_interpreter_stack())


def is_differentiated_otherwise(*tensors: Tensor | None) -> bool:
    """Whether a derivative by forward mode or torch.func goes through any of ``tensors``.

    For the Autograd kernel of an op, which every level of torch.func calls with wrappers of its own.
    """
    if not in_functorch():
        return in_dual_level() and has_tangent(*tensors)
    levels = {level.level(): level.key() for level in _functorch.get_interpreter_stack()}
    return any(t is not None and _is_tracked(t, levels) for t in tensors)


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether any of ``tensors`` carries a tangent; outside torch.func, and not cheap."""
    return any(t is not None and torch._VF._unpack_dual(t, level=0).tangent is not None for t in tensors)


def has_tangent_in_graph(*tensors: Tensor | None) -> bool:
    """The same in a graph of Dynamo's, which enters the one level that there is without telling
    ``torch.autograd.forward_ad``. A mode that looks on would see the question, so one in eager code is spared it, and
    Inductor, which records again what has been functionalized: it counts the ops."""
    if TracingContext.try_get() is None:
        may_be_graph = not (dispatch_modes and dispatch_modes())
    else:
        may_be_graph = not _is_active("PROXY") or _is_active("FUNCTIONAL")
    return may_be_graph and has_tangent(*tensors)


def _is_active(mode: str) -> bool:
    """Whether torch's own mode of that name sees this thread's ops."""
    return torch._C._get_dispatch_mode(getattr(torch._C._TorchDispatchModeKey, mode)) is not None


def is_dual_or_wrapped(tensor: Tensor) -> bool:
    """Whether forward mode or torch.func may be differentiating, or batching, by ``tensor``."""
    return _functorch.is_functorch_wrapped_tensor(tensor) or (in_dual_level() and has_tangent(tensor))


def _is_tracked(tensor: Tensor, levels: dict[int, object]) -> bool:
    innermost_level = max(levels)
    while _functorch.is_functorch_wrapped_tensor(tensor):
        level = _functorch.maybe_get_level(tensor)
        if levels.get(level) == _JVP:
            # Of another level than the one at work a tangent cannot be asked for. What it may have counts as one.
            if level != innermost_level or has_tangent(tensor):
                return True
        elif _functorch.is_gradtrackingtensor(tensor) and torch.is_grad_enabled() and tensor.requires_grad:
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def _innermost(tensor: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
