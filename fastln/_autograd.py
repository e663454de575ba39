"""The derivatives of ``fastln.layer_norm``.

``backward()`` runs our kernels, through an autograd function that costs as little on the host as one in Python can.
All other derivatives (second and higher ones, forward mode, torch.func) go through the formula written out, which
torch differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from fastln import _formula
from fastln._norm_fakes import check
from fastln._transforms import in_derivative, in_dual_level, in_functorch, requires_grad

_op = torch.ops.fastln.layer_norm.default
_fwd = torch.ops.fastln.layer_norm_fwd.default
_bwd = torch.ops.fastln.layer_norm_bwd.default
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


def run(overload, *args, **kwargs):
    """The op, past the kernel that makes it differentiable."""
    if _is_dynamo_compiling():  # compiled autograd, which traces backward() and knows no such guard
        return overload(*args, **kwargs)
    with _BelowAutograd():
        return overload._op(*args, **kwargs)  # what calling the overload comes to, less a call in Python


# What torch.utils.checkpoint raises where a recomputation has saved its last tensor.
_RecomputationDone = getattr(checkpoint, "_StopRecomputationError", ())


def behind_gate(function: Callable) -> Callable:
    """``function`` as a gate in C++ calls it, where no exception keeps its type on the way back.

    So the one that ends a checkpoint's recomputation early cannot: the recomputation then goes on to its end, which
    saves nothing more.
    """

    def call(*args):
        try:
            return function(*args)
        except _RecomputationDone:
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                return function(*args)

    return call


def needs_backward(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether autograd is to record a call with these; outside transforms, and cheaper than ``requires_grad``."""
    return torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The op, recorded for whichever derivative is under way."""
    if in_dual_level() or in_functorch():
        if in_derivative() or requires_grad(input, weight, bias):
            check(input, normalized_shape, weight, bias)
            return _formula.layer_norm(input, normalized_shape, weight, bias, eps)
    elif needs_backward(input, weight, bias):
        return LayerNorm.apply(input, normalized_shape, weight, bias, eps)
    return run(_op, input, normalized_shape, weight, bias, eps)


class LayerNorm(torch.autograd.Function):
    """layer_norm_fwd, and layer_norm_bwd on the way back. Saves input, mean, rstd and weight."""

    @staticmethod
    def forward(ctx, input, normalized_shape, weight, bias, eps):
        with _BelowAutograd():
            y, mean, rstd = _fwd._op(input, normalized_shape, weight, bias, eps)
        ctx.save_for_backward(input, mean, rstd, weight)
        ctx.normalized_shape = tuple(normalized_shape)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, grad_out):
        input, mean, rstd, weight = ctx.saved_tensors
        of_input, _, of_weight, of_bias, _ = ctx.needs_input_grad
        mask = (of_input, of_weight, of_bias)
        if backward_is_differentiated():
            grads = _formula.gradients(grad_out, input, ctx.normalized_shape, weight, ctx.eps, mask)
        else:
            grads = gradients(grad_out, input, ctx.normalized_shape, mean, rstd, weight, ctx.bias_dtype, mask)
        return grads[0], None, grads[1], grads[2], None


def backward_is_differentiated() -> bool:
    """Whether the backward that is running is itself to be differentiated (create_graph), or batched by vmap."""
    return torch.is_grad_enabled() or in_dual_level() or in_functorch()


def gradients(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """layer_norm_bwd where nothing differentiates it. dbias comes in the dtype of the bias, or in that of the sums,
    which autograd converts: it is rounded once."""
    # The op asks the bias for its dtype alone, so that a weight of the same one can stand in for it.
    like_bias = weight if weight is not None and weight.dtype == bias_dtype else None
    return run(_bwd, grad_out, input, normalized_shape, mean, rstd, weight, like_bias, mask)
