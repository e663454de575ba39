"""Whether forward-mode differentiation is under way, which an op without a rule for it must not ignore."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad


def in_dual_level() -> bool:
    """Whether there may be dual tensors at all; cheap."""
    return forward_ad._current_level >= 0


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether any of ``tensors`` carries a tangent."""
    return in_dual_level() and any(
        t is not None and forward_ad.unpack_dual(t, level=forward_ad._current_level).tangent is not None
        for t in tensors
    )
