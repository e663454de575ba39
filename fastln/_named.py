"""What the named ops need in Python: fakes, and autograd. Both are loops over the list of kernels."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fastln import _autograd, _formula
from fastln._library import KERNELS, Kernel, registrations
from fastln._refuse import dtype_name, refuse
from fastln._transforms import has_tangent_in_graph, in_functorch, is_differentiated_otherwise, needs_backward

# -------------------------------------------------------------------------------------------- checks


def _fail(kernel: Kernel, text: str) -> NoReturn:
    refuse(f"layer_norm_{kernel.name}", text)


def _check_input(kernel: Kernel, input: Tensor) -> None:
    if input.dtype != kernel.dtype:
        _fail(kernel, f"expected input of dtype {kernel.element}, got {dtype_name(input.dtype)}")
    if input.dim() == 0:
        _fail(kernel, "expected input with at least 1 dimension, got 0")


def _check_affine(kernel: Kernel, what: str, tensor: Tensor | None, input: Tensor) -> None:
    if tensor is None:
        return
    cols = input.shape[-1]
    if tensor.dim() != 1 or tensor.shape[0] != cols:
        _fail(kernel, f"expected {what} of shape [{cols}], got {list(tensor.shape)}")
    if tensor.dtype not in (kernel.dtype, torch.float32):
        wanted = kernel.element if kernel.element == "float32" else f"{kernel.element} or float32"
        _fail(kernel, f"expected {what} of dtype {wanted}, got {dtype_name(tensor.dtype)}")
    if tensor.device != input.device:
        _fail(kernel, f"expected {what} on {input.device}, got {tensor.device}")


def _check_out(kernel: Kernel, out: Tensor, input: Tensor) -> None:
    if out.shape != input.shape:
        _fail(kernel, f"expected out of shape {list(input.shape)}, got {list(out.shape)}")
    if out.dtype != kernel.dtype:
        _fail(kernel, f"expected out of dtype {kernel.element}, got {dtype_name(out.dtype)}")
    if out.device != input.device:
        _fail(kernel, f"expected out on {input.device}, got {out.device}")
    if not out.is_contiguous():
        _fail(kernel, f"expected a contiguous out, got strides {list(out.stride())}")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that the tensor's elements lie in, as [first, last)."""
    size, first = tensor.element_size(), tensor.storage_offset()
    if tensor.numel() == 0:
        return first * size, first * size
    last = first + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    return max(a0, b0) < min(a1, b1)


# What may be wrong with `out`, by the number that gate_out() in src/bindings_named.cpp knows it by.
_OUT_REFUSALS = (
    "",
    "expected no argument of the out overload to require grad, got one that does",
    "expected out to be input itself or not to overlap it, got a partial overlap",
    "expected out not to overlap weight, got an overlap",
    "expected out not to overlap bias, got an overlap",
)


def _overlap_refusal(out: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> int:
    in_place = out.storage_offset() == input.storage_offset() and input.is_contiguous()
    if _overlap(out, input) and not in_place:
        return 2
    if weight is not None and _overlap(out, weight):
        return 3
    return 4 if bias is not None and _overlap(out, bias) else 0


# ---------------------------------------------------------------------------------------------- fakes


def _register_fakes(kernel: Kernel, name: str) -> None:
    @torch.library.register_fake(f"fastln::{name}")
    def default(input, weight=None, bias=None, eps=1e-5):
        _check_input(kernel, input)
        _check_affine(kernel, "weight", weight, input)
        _check_affine(kernel, "bias", bias, input)
        return input.new_empty(input.shape)

    @torch.library.register_fake(f"fastln::{name}.scalar")
    def scalar(input, weight, bias, eps=1e-5):
        _check_input(kernel, input)
        return input.new_empty(input.shape)

    @torch.library.register_fake(f"fastln::{name}.out")
    def out(input, weight=None, bias=None, eps=1e-5, *, out):
        _check_input(kernel, input)
        _check_affine(kernel, "weight", weight, input)
        _check_affine(kernel, "bias", bias, input)
        _check_out(kernel, out, input)
        if refusal := _overlap_refusal(out, input, weight, bias):
            _fail(kernel, _OUT_REFUSALS[refusal])


# ------------------------------------------------------------------------------------------- autograd


class _Named(torch.autograd.Function):
    """A named op, whose gradients are those of the formula with statistics in float32, whatever it accumulates in.

    Saves input and weight; the way back recomputes the statistics, which the kernels do not keep.
    """

    @staticmethod
    def forward(ctx, overload, input, weight, bias, eps):
        is_scalar = not isinstance(weight, Tensor) and weight is not None
        ctx.save_for_backward(input, None if is_scalar else weight)
        ctx.scalar = weight if is_scalar else None
        ctx.bias_dtype = bias.dtype if isinstance(bias, Tensor) else None
        ctx.eps = eps
        return _autograd.run(overload, input, weight, bias, eps)

    @staticmethod
    def backward(ctx, grad_out):
        input, weight = ctx.saved_tensors
        shape = input.shape[-1:]
        if ctx.scalar is not None:
            weight = input.new_full(shape, ctx.scalar, dtype=torch.float32)  # a DTensor of a DTensor
        mask = ctx.needs_input_grad[1:4]
        if _autograd.backward_is_differentiated():
            grads = _formula.gradients(grad_out, input, shape, weight, ctx.eps, mask)
        else:
            _, mean, rstd = _autograd.run(torch.ops.fastln.layer_norm_fwd.default, input, shape, None, None, ctx.eps)
            grads = _autograd.gradients(grad_out, input, shape, mean, rstd, weight, ctx.bias_dtype, mask)
        return None, *grads, None


_NO_RULE = "expected no derivative by forward mode or torch.func, which this op does not have, got one"


def _has_no_rule(*tensors):
    """Whether a derivative that the op has no rule for is to be taken through any of these."""
    if is_differentiated_otherwise(*tensors):
        return True
    # _Named refuses a tangent by itself, and to ask for one takes a microsecond a tensor.
    return not in_functorch() and not needs_backward(*tensors[:3]) and has_tangent_in_graph(*tensors)


def _recorded(overload, input, weight, bias, eps):
    """The op, recorded for ``backward()``; outside what it has no rule for."""
    if needs_backward(*(a for a in (input, weight, bias) if isinstance(a, Tensor))):
        return _Named.apply(overload, input, weight, bias, eps)
    return _autograd.run(overload, input, weight, bias, eps)


def _out_is_differentiated(input, weight, bias, out):
    return needs_backward(input, weight, bias) or needs_backward(out) or _has_no_rule(input, weight, bias, out)


def _register_autograd(kernel: Kernel) -> None:
    """The Autograd kernel of each overload, for the tensors that its gate in C++ does not take."""
    op = kernel.op

    def default(input, weight=None, bias=None, eps=1e-5):
        if _has_no_rule(input, weight, bias):
            _fail(kernel, _NO_RULE)
        return _recorded(op.default, input, weight, bias, eps)

    def scalar(input, weight, bias, eps=1e-5):
        if _has_no_rule(input):
            _fail(kernel, _NO_RULE)
        return _recorded(op.scalar, input, weight, bias, eps)

    def out(input, weight=None, bias=None, eps=1e-5, *, out):
        if _out_is_differentiated(input, weight, bias, out):
            _fail(kernel, _OUT_REFUSALS[1])
        _autograd.run(op.out, input, weight, bias, eps, out=out)

    for overload, function in (("default", default), ("scalar", scalar), ("out", out)):
        _autograd.register(getattr(op, overload), getattr(kernel.twin, overload), function)


def _register_behind_gates() -> None:
    """Where the gates send plain tensors in grad mode. They raise the errors, of which these tell them by what they
    return: one raised here would lose its text on the way through C."""
    ops = [kernel.op for kernel in KERNELS]

    def with_grad(index, input, weight, bias, eps):
        if _has_no_rule(input, weight, bias):
            return None
        return _recorded(ops[index].default, input, weight, bias, eps)

    def with_grad_scalar(index, input, weight, bias, eps):
        return None if _has_no_rule(input) else _recorded(ops[index].scalar, input, weight, bias, eps)

    def with_grad_out(index, input, weight, bias, eps, out):
        if _out_is_differentiated(input, weight, bias, out):
            return 1
        refusal = _overlap_refusal(out, input, weight, bias)
        if refusal == 0:
            _autograd.run(ops[index].out, input, weight, bias, eps, out=out)
        return refusal

    registrations.impl("_with_grad", _autograd.behind_gate(with_grad), "CompositeImplicitAutograd")
    registrations.impl("_with_grad.scalar", _autograd.behind_gate(with_grad_scalar), "CompositeImplicitAutograd")
    registrations.impl("_with_grad.out", with_grad_out, "CompositeImplicitAutograd")


for _kernel in KERNELS:
    _register_fakes(_kernel, f"layer_norm_{_kernel.name}")
    _register_fakes(_kernel, f"_layer_norm_{_kernel.name}")
    _register_autograd(_kernel)
_register_behind_gates()
