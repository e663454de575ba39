"""``fastln.layer_norm``, the function that models call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, compiler
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from fastln import _autograd
from fastln import _negative as _negative  # what it registers for torch to find
from fastln._autocast import autocast_arguments
from fastln._compile import layer_norm_in_graph
from fastln._norm_fakes import check
from fastln._plan import Plan as Plan
from fastln._plan import force_plan as force_plan
from fastln._plan import plan as plan
from fastln._refuse import as_schema
from fastln._transforms import dispatch_modes, in_dual_level, in_functorch, in_pre_dispatch

_op = torch.ops.fastln.layer_norm.default
_launch = torch.ops.fastln._layer_norm.default._op  # the same kernels, without autograd
_is_dynamo_compiling = compiler.is_dynamo_compiling
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_grad_enabled = torch.is_grad_enabled
_is_jit_tracing = torch._C._is_tracing
_in_dispatch_mode = dispatch_modes or (lambda: False)
_TENSORS = _autograd._PLAIN
_PARAMETERS = frozenset((*_TENSORS, type(None)))
_SHAPES = frozenset((tuple, list, torch.Size))


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
        TypeError: An argument is of no type that ``F.layer_norm`` takes.

    On CUDA the kernel runs on the current stream of the input's device, and the bits of a row depend on its
    values, the number of columns, the dtype and the parameters alone: not on the batch, nor on the row's
    place, stride or alignment in it. On the CPU this is aten's kernel.
    """
    # A plain call costs little more than the op's launch: hence names bound once, and no further function but the one
    # that launches. (The first condition is torch.compiler.is_compiling(), in the order that Dynamo needs.)
    if _is_dynamo_compiling() or compiler._is_compiling_flag:
        return layer_norm_in_graph(input, normalized_shape, weight, bias, eps)
    try:
        if has_torch_function_variadic(input, weight, bias):  # torch.fx for one, whose proxies are no tensors
            return _overridden(input, normalized_shape, weight, bias, eps)
        if (
            type(eps) is float
            and type(normalized_shape) in _SHAPES
            and type(normalized_shape[0]) is int
            and type(input) in _TENSORS
            and type(weight) in _PARAMETERS
            and type(bias) in _PARAMETERS
        ):
            is_plain = True
        else:
            normalized_shape, eps = as_schema("layer_norm", input, normalized_shape, weight, bias, eps)
            is_plain = type(input) in _TENSORS and type(weight) in _PARAMETERS and type(bias) in _PARAMETERS
        if _is_any_autocast_enabled():
            input, weight, bias = autocast_arguments(input, weight, bias)
        if forward_ad._current_level >= 0 or in_functorch() or _is_jit_tracing():  # the first as in_dual_level() says
            return _transformed(input, normalized_shape, weight, bias, eps)
        if _is_grad_enabled() and (
            input.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            if input.is_nested:  # torch has its own way with these
                return torch.layer_norm(input, normalized_shape, weight, bias, eps)
            return _autograd.recorded(input, normalized_shape, weight, bias, eps)
        if is_plain and not _in_dispatch_mode():
            return _launch(input, normalized_shape, weight, bias, eps)
        if input.is_nested:
            return torch.layer_norm(input, normalized_shape, weight, bias, eps)
        # A mode, or the tensor's own dispatch, is to see the op itself; not past the gate in C++, which knows sizes as
        # plain integers alone.
        return _autograd.run(_op, input, normalized_shape, weight, bias, eps)
    except (AttributeError, LookupError, RuntimeError, TypeError):
        # Looked at only now, as it would take longer than the rest. A private name may stand in what was raised.
        shape, eps = as_schema("layer_norm", input, normalized_shape, weight, bias, eps)
        if input.is_nested:  # and went the way of plain tensors, where no kernel takes it
            return torch.layer_norm(input, shape, weight, bias, eps)
        if len(shape) == 0:
            check(input, shape, weight, bias)
        raise


def _transformed(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The call where a transform is under way, or torch.jit.trace."""
    if input.is_nested:
        return torch.layer_norm(input, normalized_shape, weight, bias, eps)
    if in_dual_level() or in_functorch():
        return _autograd.layer_norm(input, normalized_shape, weight, bias, eps)
    return _op(input, normalized_shape, weight, bias, eps)  # a trace knows no function of Python's, and no private twin


def _overridden(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The call as a mode of ``__torch_function__``, or a tensor with one of its own, has it."""
    if in_pre_dispatch():  # make_fx's mode, which captures ops but looks into functions
        return _op(input, normalized_shape, weight, bias, eps)
    return handle_torch_function(layer_norm, (input, weight, bias), input, normalized_shape, weight, bias, eps)
