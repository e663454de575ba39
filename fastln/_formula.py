"""Layer norm and its gradients written out in torch's differentiable ops.

Slow, and right under derivatives of any kind and number. torch's own layer norm is not: a third derivative, and any
derivative of a forward-mode one, takes mean and rstd for constants, and without a weight the second derivative by the
bias is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastln._norm_fakes import stats_dtype


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """What ``fastln.layer_norm`` computes, with the same dtypes and a contiguous result."""
    wide = stats_dtype(input)
    y, _ = _normalised(input.to(wide), normalized_shape, eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(input.dtype).contiguous()


def gradients(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | Tensor,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias that ``mask`` asks for, and None for the others.

    They come in the dtype of the sums; autograd converts what a function's backward returns.
    """
    wide = stats_dtype(input)
    dims, leading = _row_dims(normalized_shape), tuple(range(input.dim() - len(normalized_shape)))
    dy = grad_out.to(wide)
    xhat, rstd = _normalised(input.to(wide), normalized_shape, eps)
    dx = dweight = dbias = None
    if mask[0]:
        g = dy if weight is None else dy * weight.to(wide)
        dx = rstd * (g - g.mean(dims, keepdim=True) - xhat * (g * xhat).mean(dims, keepdim=True))
    if mask[1]:
        dweight = _sum(dy * xhat, leading)
    if mask[2]:
        dbias = _sum(dy, leading)
    return dx, dweight, dbias


def eps_of(input: Tensor, normalized_shape: Sequence[int], rstd: Tensor) -> Tensor:
    """The eps that rows have this rstd with: a tensor of its shape, as torch hands no eps on to a backward."""
    variance = input.to(rstd.dtype).var(_row_dims(normalized_shape), correction=0, keepdim=True)
    return rstd.square().reciprocal().view_as(variance) - variance


def _normalised(x: Tensor, normalized_shape: Sequence[int], eps: float | Tensor) -> tuple[Tensor, Tensor]:
    """(x - mean) * rstd, and rstd."""
    dims = _row_dims(normalized_shape)
    if isinstance(eps, float) and eps > 0:  # as in the kernels, never rounded to zero: 0 * inf = NaN in constant rows
        eps = max(eps, torch.finfo(x.dtype).tiny)
    centred = x - x.mean(dims, keepdim=True)
    rstd = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    return centred * rstd, rstd


def _row_dims(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _sum(t: Tensor, dims: tuple[int, ...]) -> Tensor:
    return t.sum(dims) if dims else t  # of no dimension, sum() takes all of them
