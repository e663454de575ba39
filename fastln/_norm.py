"""What ``fastln::layer_norm`` needs in Python: the function that models call, its plans, and autograd."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from fastln import _autograd
from fastln._autocast import autocast_arguments
from fastln._compile import traced
from fastln._library import library
from fastln._norm_fakes import FLOATING
from fastln._refuse import check_types, dtype_name, refuse
from fastln._transforms import dispatch_modes, in_derivative, in_functorch, requires_grad

_op = torch.ops.fastln.layer_norm.default
_launch = torch.ops.fastln._layer_norm.default._op  # the same kernels, without autograd
_is_compiling = torch.compiler.is_compiling
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_grad_enabled = torch.is_grad_enabled
_in_dispatch_mode = dispatch_modes or (lambda: False)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""Layer normalization over the last dimensions, with the signature and meaning of ``F.layer_norm``.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \mathrm{eps}}} \cdot weight + bias

    with the biased variance, as J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization" (2016), have it.

    Args:
        input: ``[..., *normalized_shape]``, float16, bfloat16, float32 or float64, in any layout. Rows that
            lie evenly spaced are read in place; other layouts are copied once. Nested tensors get torch's own layer
            norm.
        normalized_shape: Sizes of the last dimensions, which are normalized together. Their product may be any
            number; no limit depends on the kernel.
        weight: ``normalized_shape``, or None for 1. Its dtype is the input's or float32; another floating dtype
            is converted.
        bias: ``normalized_shape``, or None for 0; dtypes as for ``weight``.
        eps: Added to the variance.

    Returns:
        A new contiguous tensor of the input's shape and dtype; under ``torch.autocast`` on CUDA it is float32, as
        that of ``F.layer_norm`` is. Sums, mean, variance and the final multiply-add are float32 (float64 for float64
        input). On CUDA values up to 1e18 in magnitude are right to rounding; past that their squares overflow, and
        the row comes out as ``bias``.

    Raises:
        RuntimeError: A dtype, shape or device does not fit, or the GPU's compute capability is not in this
            build; the message names what was expected and what came. Nothing has been launched then.
        TypeError: An argument is of no type that it takes.

    On CUDA the kernel runs on the current stream of the input's device, and the bits of a row depend on its
    values, the number of columns, the dtype and the parameters alone: not on the batch, nor on the row's
    place, stride or alignment in it. On the CPU this is aten's kernel.
    """
    # A plain call costs little more than the op's launch: hence names bound once, and no further function but the one
    # that launches.
    if _is_compiling():
        return traced(input, normalized_shape, weight, bias, eps)
    try:
        if has_torch_function_variadic(input, weight, bias):  # torch.fx for one, whose proxies are no tensors
            arguments = (input, normalized_shape, weight, bias, eps)
            return handle_torch_function(layer_norm, (input, weight, bias), *arguments)
        if input.is_nested:  # torch has its own way with these
            return torch.layer_norm(input, normalized_shape, weight, bias, eps)
        if _is_any_autocast_enabled():
            input, weight, bias = autocast_arguments(input, weight, bias)
        if forward_ad._current_level >= 0 or in_functorch():  # as in_dual_level() says
            return _autograd.layer_norm(input, normalized_shape, weight, bias, eps)
        if _is_grad_enabled() and (
            input.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            return _autograd.recorded(input, normalized_shape, weight, bias, eps)
        if _in_dispatch_mode():  # which is to see the op itself
            return _op(input, normalized_shape, weight, bias, eps)
        return _launch(input, normalized_shape, weight, bias, eps)
    except (AttributeError, RuntimeError, TypeError):  # looked at only now, as it would take longer than the rest
        check_types("layer_norm", input, normalized_shape, weight, bias, eps)
        raise


# ------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class Plan:
    """The kernel variant that rows of one length and dtype get on a GPU.

    Attributes:
        pieces: Pieces of 16 bytes that a thread holds in registers; 0 if the row is cut into chunks instead, over
            three launches.
        threads: Threads of a row within a block; up to 32, several rows share a block.
        cluster: Blocks that share a row through distributed shared memory.
    """

    pieces: int
    threads: int
    cluster: int


def plan(
    cols: int,
    dtype: torch.dtype = torch.float16,
    clusters: bool = True,
    wide_blocks: bool = True,
    wide_clusters: bool = True,
) -> Plan:
    """The variant that ``layer_norm`` picks for rows of ``cols`` elements.

    It depends on nothing else, so a row's result is the same in every batch.

    Args:
        cols: Product of ``normalized_shape``, at least 1.
        dtype: dtype of the input.
        clusters: Whether the GPU has thread block clusters (compute capability 9.0 and later).
        wide_blocks: Whether it runs blocks of 1024 threads for long rows (compute capability before 10.0).
        wide_clusters: Whether its clusters may have 16 blocks, as they may on an H200; on a part of a GPU, or on one
            with fewer than 16 multiprocessors side by side, they have at most 8.

    Raises:
        ValueError: ``cols`` is less than 1, or ``dtype`` is none that ``layer_norm`` takes.
    """
    if cols < 1:
        raise ValueError(f"fastln.plan: expected cols of at least 1, got {cols}")
    if dtype not in FLOATING:
        raise ValueError(f"fastln.plan: expected float16, bfloat16, float32 or float64, got {dtype_name(dtype)}")
    values = (ctypes.c_int32 * 3)()
    max_cluster = 1 if not clusters else 16 if wide_clusters else 8
    library.fastln_plan(ctypes.c_int64(cols), dtype.itemsize, max_cluster, wide_blocks, values)
    return Plan(*values)


def force_plan(text: str) -> None:
    """Makes ``layer_norm`` use one variant wherever it can hold the row; for tests and for tuning.

    The environment variable ``FASTLN_PLAN`` does the same from the start of the process.

    Args:
        text: ``"pieces=4,threads=128"``, optionally with ``cluster=2``; ``"split"`` for the row in chunks; or
            ``""`` for none.

    Raises:
        ValueError: The text is none of these.
    """
    if text in ("", "split"):
        library.fastln_force_plan(-1 if text == "" else 0, 0, 1)
        return
    try:
        values = {"cluster": 1} | {key: int(value) for key, value in (part.split("=") for part in text.split(","))}
        runnable = _runnable(**values)
    except (ValueError, TypeError):
        runnable = False
    if not runnable:
        raise ValueError(f'fastln: expected a plan like "pieces=4,threads=128", got "{text}"')
    library.fastln_force_plan(values["pieces"], values["threads"], values["cluster"])


def _runnable(pieces: int, threads: int, cluster: int) -> bool:
    most = {4: 768, 8: 1024}.get(pieces, 512) if cluster == 1 else 512
    whole_warps = threads % 32 == 0 and 32 <= threads <= most
    if cluster > 1:
        return cluster in (2, 4, 8, 16) and pieces == 8 and whole_warps
    if threads in (1, 2, 4, 8, 16):
        return cluster == 1 and pieces in (2, 3)
    return cluster == 1 and pieces in (2, 3, 4, 5, 8) and whole_warps


# ------------------------------------------------------------------------------------------- autograd


# Registrations live as long as the Library object that made them.
_registrations = torch.library.Library("fastln", "IMPL")


def _register_without_derivative(name: str) -> None:
    """An op that has no derivative runs where none is needed, and refuses where one is."""
    overload = getattr(torch.ops.fastln, name).default

    def is_differentiated(args):
        return in_derivative() or requires_grad(*(a for a in args if isinstance(a, Tensor)))

    def traced(*args):
        if is_differentiated(args):
            wanted = f"expected no argument of {name} to need a derivative, which layer_norm has"
            refuse(name, f"{wanted}, got one that does")
        return _autograd.run(overload, *args)

    def gated(*args):
        return (None, None, None) if is_differentiated(args) else _autograd.run(overload, *args)

    _autograd.register(_registrations, overload, getattr(torch.ops.fastln, f"_{name}").default, traced)
    _registrations.impl(f"_{name}_without_grad", gated, "CompositeImplicitAutograd")


_autograd.register(_registrations, _op, torch.ops.fastln._layer_norm.default, _autograd.layer_norm)
_registrations.impl("_layer_norm_with_grad", _autograd.behind_gate(_autograd.layer_norm), "CompositeImplicitAutograd")
for _name in ("layer_norm_fwd", "layer_norm_bwd"):
    _register_without_derivative(_name)
_registrations.impl("_layer_norm_bwd_recorded", _autograd.put_right, "CompositeImplicitAutograd")

force_plan(os.environ.get("FASTLN_PLAN", ""))
