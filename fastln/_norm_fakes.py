"""Checks and fakes of the general ops, ``layer_norm``, ``layer_norm_fwd`` and ``layer_norm_bwd``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastln import _library  # noqa: F401  (defines the ops)
from fastln._refuse import dtype_name, refuse, refuse_shape

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def stats_dtype(input: Tensor) -> torch.dtype:
    """The dtype of mean and rstd, and of every sum."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


# -------------------------------------------------------------------------------------------- checks


def _check_device(op: str, what: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        refuse(op, f"expected {what} on {input.device}, got {tensor.device}")


def _check_affine(op: str, what: str, tensor: Tensor | None, input: Tensor, shape: Sequence[int]) -> None:
    if tensor is None:
        return
    if list(tensor.shape) != list(shape):
        refuse(op, f"expected {what} of shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in FLOATING:
        wanted = "float16, bfloat16, float32 or float64"
        refuse(op, f"expected {what} of dtype {wanted}, got {dtype_name(tensor.dtype)}")
    _check_device(op, what, tensor, input)


def check(
    input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, op: str = "layer_norm"
) -> None:
    """Raises RuntimeError for arguments that ``fastln::<op>`` does not take."""
    if input.dtype not in FLOATING:
        wanted = "float16, bfloat16, float32 or float64"
        refuse(op, f"expected input of dtype {wanted}, got {dtype_name(input.dtype)}")
    if len(shape) == 0:
        refuse(op, "expected normalized_shape of at least 1 dimension, got []")
    if input.dim() < len(shape) or list(input.shape[-len(shape) :]) != list(shape):
        refuse_shape(op, shape, input.shape)
    _check_affine(op, "weight", weight, input, shape)
    _check_affine(op, "bias", bias, input, shape)


def check_bwd(grad_out, input, shape, mean, rstd, weight, bias, output_mask) -> None:
    """Raises RuntimeError for arguments that ``fastln::layer_norm_bwd`` does not take."""
    op = "layer_norm_bwd"
    if len(output_mask) != 3:
        refuse(op, f"expected output_mask of 3 booleans, got {len(output_mask)}")
    check(input, shape, weight, bias, op)
    if list(grad_out.shape) != list(input.shape):
        refuse(op, f"expected grad_out of shape {list(input.shape)}, got {list(grad_out.shape)}")
    if grad_out.dtype != input.dtype:
        refuse(op, f"expected grad_out of dtype {dtype_name(input.dtype)}, got {dtype_name(grad_out.dtype)}")
    _check_device(op, "grad_out", grad_out, input)
    rows = math.prod(input.shape[: input.dim() - len(shape)])
    for what, tensor in (("mean", mean), ("rstd", rstd)):
        if tensor.numel() != rows:
            refuse(op, f"expected {what} of {rows} elements, one a row, got {tensor.numel()}")
        if tensor.dtype != stats_dtype(input):
            wanted = dtype_name(stats_dtype(input))
            refuse(op, f"expected {what} of dtype {wanted}, got {dtype_name(tensor.dtype)}")
        _check_device(op, what, tensor, input)


# --------------------------------------------------------------------------------------------- fakes


@torch.library.register_fake("fastln::layer_norm")
def _fake(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    check(input, normalized_shape, weight, bias)
    return input.new_empty(input.shape)


torch.library.register_fake("fastln::_layer_norm", _fake)


@torch.library.register_fake("fastln::layer_norm_fwd")
def _fake_fwd(input, normalized_shape, weight, bias, eps):
    check(input, normalized_shape, weight, bias, "layer_norm_fwd")
    stats = [*input.shape[: input.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
    return (
        input.new_empty(input.shape),
        input.new_empty(stats, dtype=stats_dtype(input)),
        input.new_empty(stats, dtype=stats_dtype(input)),
    )


torch.library.register_fake("fastln::_layer_norm_fwd", _fake_fwd)


@torch.library.register_fake("fastln::layer_norm_bwd")
def _fake_bwd(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    check_bwd(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)

    def grad_of(parameter):
        dtype = stats_dtype(input) if parameter is None else parameter.dtype
        return input.new_empty(normalized_shape, dtype=dtype)

    return (
        input.new_empty(input.shape) if output_mask[0] else None,
        grad_of(weight) if output_mask[1] else None,
        grad_of(bias) if output_mask[2] else None,
    )


torch.library.register_fake("fastln::_layer_norm_bwd", _fake_bwd)
