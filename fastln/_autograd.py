"""The derivatives of ``fastln.layer_norm``.

``backward()`` runs our kernels. They are recorded by torch's own autograd of ``native_layer_norm``, in C++, where that
can be (src/bindings_autograd.cpp), else by an autograd function in Python, which takes the host longer. All other
derivatives (second and higher ones, forward mode, torch.func) go through the formula written out, which torch
differentiates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from fastln import _formula
from fastln._library import registrations
from fastln._norm_fakes import check, check_bwd, stats_dtype
from fastln._transforms import (
    dispatch_modes,
    has_tangent_in_graph,
    in_derivative,
    in_dual_level,
    in_functorch,
    is_differentiated_otherwise,
    needs_backward,
    requires_grad,
)

_op = torch.ops.fastln.layer_norm.default
_fwd = torch.ops.fastln.layer_norm_fwd.default
_bwd = torch.ops.fastln.layer_norm_bwd.default
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_NEGATIVE = torch._C.DispatchKey.Negative
_PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that have no dispatch of their own."""
# A later torch may no longer have these; then autograd in Python records every call.
_include = getattr(torch._C, "_dispatch_tls_set_dispatch_key_included", None)
_hooks_on_saved_tensors = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def run(overload, *args, **kwargs):
    """The op, past the kernel that makes it differentiable."""
    if _is_dynamo_compiling():  # compiled autograd, which traces backward() and knows no such guard
        return overload(*args, **kwargs)
    with _BelowAutograd():
        return overload._op(*args, **kwargs)  # what calling the overload comes to, less a call in Python


_TRACED_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")


def register(op, twin, kernel: Callable) -> None:
    """Gives ``op``, whose gate in C++ takes plain tensors, ``kernel`` for the others: fake and meta tensors, and every
    tensor while the Python dispatcher traces. Its private ``twin`` is called from below autograd alone."""
    registrations.impl(op, kernel, "AutogradMeta")
    for key in _TRACED_KEYS:
        op.py_impl(getattr(torch._C.DispatchKey, key))(kernel)
    registrations.impl(twin, torch.library.fallthrough_kernel, "Autograd")


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
        return recorded(input, normalized_shape, weight, bias, eps)
    elif has_tangent_in_graph(input, weight, bias):
        return _formula.layer_norm(input, normalized_shape, weight, bias, eps)
    return run(_op, input, normalized_shape, weight, bias, eps)


def recorded(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The op, recorded for ``backward()``; outside transforms."""
    if _suits_torch(input, weight, bias):
        # Leads torch to the kernels of src/bindings_autograd.cpp. (torch's guard for this takes four times as long.)
        _include(_NEGATIVE, True)
        try:
            return torch.layer_norm(input, normalized_shape, weight, bias, eps)
        finally:
            _include(_NEGATIVE, False)
    return RecordedLayerNorm.apply(input, normalized_shape, weight, bias, eps)


def _suits_torch(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's own autograd may record this call, whose input is not nested.

    It knows one dtype, no more, and by a bias without a weight no second derivative. A mode would be shown aten's op
    rather than ours, and hooks on what is saved would be given one tensor more.
    """
    dtype = input.dtype
    return (
        input.is_cuda
        and type(input) in _PLAIN
        and input.layout is torch.strided
        and (bias is None if weight is None else type(weight) in _PLAIN and weight.dtype is dtype)
        and (bias is None or (type(bias) in _PLAIN and bias.dtype is dtype))
        and not dispatch_modes()
        and _hooks_on_saved_tensors(False) is None
    )


if None in (_include, dispatch_modes, _hooks_on_saved_tensors):

    def _suits_torch(*_):
        return False


def put_right(*grads: Tensor | None) -> None:
    """Puts our formula in the place of torch's for what is differentiated after ``backward(create_graph=True)``.

    torch takes mean and rstd for constants there, which makes third derivatives wrong. Called with its results by the
    kernel of a backward that torch is just recording: the node for it can be reached when all of backward() is done.
    """

    def when_recorded():
        _replace_derivative(next(g.grad_fn for g in grads if g is not None))

    # Where no backward() is under way, somebody calls the node by hand, and gets torch's formula.
    with contextlib.suppress(RuntimeError):
        Variable._execution_engine.queue_callback(when_recorded)


def _replace_derivative(node: torch.autograd.graph.Node) -> None:
    """Has our formula differentiate what ``node``, torch's record of a backward, computed."""
    shape = node._saved_normalized_shape
    sources = {"grad_out": node._saved_grad_out, "input": node._saved_input, "weight": node._saved_weight}
    with torch.no_grad():
        eps = _formula.eps_of(sources["input"], shape, node._saved_rstd)
    # In the order of native_layer_norm_backward's arguments; None for what is not differentiated.
    edges = dict(zip(("grad_out", "input", "mean", "rstd", "weight", "bias"), node.next_functions, strict=True))
    wanted = [name for name in sources if edges[name][0] is not None]

    def second(torchs, grad_grads):
        with torch.enable_grad():
            # Views, so that what grad_out and weight may owe to the input is not differentiated here.
            seen = {name: t if t is None else t.view_as(t) for name, t in sources.items()}
            mask = [g is not None for g in grad_grads]
            first = _formula.gradients(seen["grad_out"], seen["input"], shape, seen["weight"], eps, mask)
        ours = torch.autograd.grad(
            [g for g in first if g is not None],
            [seen[name] for name in wanted],
            [g for g in grad_grads if g is not None],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        by_name = dict(zip(wanted, ours, strict=True))
        return tuple(t if t is None else by_name.get(name, t) for name, t in zip(edges, torchs, strict=True))

    node.register_hook(second)


class RecordedLayerNorm(torch.autograd.Function):
    """layer_norm_fwd, and layer_norm_bwd on the way back. Saves input, mean, rstd and weight."""

    @staticmethod
    def forward(ctx, input, normalized_shape, weight, bias, eps):
        try:
            return _forward(ctx, input, normalized_shape, weight, bias, eps)[0]
        except RuntimeError:  # which names layer_norm_fwd
            check(input, normalized_shape, weight, bias)
            raise

    @staticmethod
    def backward(ctx, grad_out):
        dx, dweight, dbias = _backward(ctx, grad_out)
        return dx, None, dweight, dbias, None


class RecordedLayerNormFwd(torch.autograd.Function):
    """The same, with mean and rstd as outputs that are differentiable too."""

    @staticmethod
    def forward(ctx, input, normalized_shape, weight, bias, eps):
        ctx.set_materialize_grads(False)
        return _forward(ctx, input, normalized_shape, weight, bias, eps)

    @staticmethod
    def backward(ctx, grad_out, grad_mean, grad_rstd):
        dx, dweight, dbias = (None, None, None) if grad_out is None else _backward(ctx, grad_out)
        if ctx.needs_input_grad[0] and (grad_mean is not None or grad_rstd is not None):
            of_stats = _gradient_of_statistics(ctx, grad_mean, grad_rstd)
            dx = of_stats if dx is None else dx + of_stats
        return dx, None, dweight, dbias, None


def _forward(ctx, input, normalized_shape, weight, bias, eps):
    with _BelowAutograd():
        outputs = _fwd._op(input, normalized_shape, weight, bias, eps)
    ctx.save_for_backward(input, outputs[1], outputs[2], weight)
    ctx.normalized_shape = tuple(normalized_shape)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.eps = eps
    return outputs


def _backward(ctx, grad_out):
    input, mean, rstd, weight = ctx.saved_tensors
    of_input, _, of_weight, of_bias, _ = ctx.needs_input_grad
    mask = (of_input, of_weight, of_bias)
    if backward_is_differentiated():
        return _formula.gradients(grad_out, input, ctx.normalized_shape, weight, ctx.eps, mask)
    return gradients(grad_out, input, ctx.normalized_shape, mean, rstd, weight, ctx.bias_dtype, mask)


def _gradient_of_statistics(ctx, grad_mean: Tensor | None, grad_rstd: Tensor | None) -> Tensor:
    """By the input, in the dtype of the sums: dmean/dx = 1/K, drstd/dx = -rstd^2 * xhat / K."""
    input = ctx.saved_tensors[0]
    xhat, rstd = _formula._normalised(input.to(stats_dtype(input)), ctx.normalized_shape, ctx.eps)
    total = torch.zeros_like(xhat)
    if grad_mean is not None:
        total = total + grad_mean
    if grad_rstd is not None:
        total = total - grad_rstd * rstd.square() * xhat
    return total / math.prod(ctx.normalized_shape)


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


# --------------------------------------------------------------------------- the ops beneath layer_norm


def layer_norm_fwd(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The op, recorded for whichever derivative is under way."""
    if in_dual_level() or in_functorch():
        if is_differentiated_otherwise(input, weight, bias) or requires_grad(input, weight, bias):
            check(input, normalized_shape, weight, bias, "layer_norm_fwd")
            return _formula_with_statistics(input, normalized_shape, weight, bias, eps)
    elif needs_backward(input, weight, bias):
        return RecordedLayerNormFwd.apply(input, normalized_shape, weight, bias, eps)
    elif has_tangent_in_graph(input, weight, bias):
        return _formula_with_statistics(input, normalized_shape, weight, bias, eps)
    return run(_fwd, input, normalized_shape, weight, bias, eps)


def _formula_with_statistics(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = _formula.layer_norm(input, normalized_shape, weight, bias, eps)
    wide = input.to(stats_dtype(input))
    mean = wide.mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
    return y, mean, _formula._normalised(wide, normalized_shape, eps)[1]


class RecordedLayerNormBwd(torch.autograd.Function):
    """layer_norm_bwd, whose own derivative is that of the formula, by mean and rstd too."""

    @staticmethod
    def forward(ctx, grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad_out, input, mean, rstd, weight, bias)
        ctx.normalized_shape, ctx.mask = tuple(normalized_shape), tuple(output_mask)
        with _BelowAutograd():
            return _bwd._op(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)

    @staticmethod
    def backward(ctx, *grads):
        places = (0, 1, 3, 4, 5, 6)
        wanted = [ctx.needs_input_grad[place] for place in places]
        with torch.enable_grad():
            # Views, so that what one of them may owe to another is not differentiated here.
            seen = [t if t is None else t.view_as(t) for t in ctx.saved_tensors]
            outputs = _formula_of_bwd(*seen[:2], ctx.normalized_shape, *seen[2:], ctx.mask)
        pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y is not None and g is not None]
        pairs = [(y, g) for y, g in pairs if y.requires_grad]
        by_place = dict.fromkeys(range(8))
        if pairs:
            sources = [t for t, is_wanted in zip(seen, wanted, strict=True) if is_wanted]
            found = torch.autograd.grad(
                [y for y, _ in pairs],
                sources,
                [g for _, g in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
            by_place |= zip((p for p, is_wanted in zip(places, wanted, strict=True) if is_wanted), found, strict=True)
        return tuple(by_place.values())


def _formula_of_bwd(grad_out, input, normalized_shape, mean, rstd, weight, bias, mask):
    """What layer_norm_bwd computes, of mean and rstd as they are given."""
    wide, leading = stats_dtype(input), input.dim() - len(normalized_shape)
    dims, of_rows = tuple(range(leading, input.dim())), [*input.shape[:leading], *[1] * len(normalized_shape)]
    dy, mean, rstd = grad_out.to(wide), mean.reshape(of_rows), rstd.reshape(of_rows)
    xhat = (input.to(wide) - mean) * rstd
    dx = dweight = dbias = None
    if mask[0]:
        g = dy if weight is None else dy * weight.to(wide)
        dx = rstd * (g - g.mean(dims, keepdim=True) - xhat * (g * xhat).mean(dims, keepdim=True))
        dx = dx.to(input.dtype)
    if mask[1]:
        dweight = _formula._sum(dy * xhat, tuple(range(leading))).to(wide if weight is None else weight.dtype)
    if mask[2]:
        dbias = _formula._sum(dy, tuple(range(leading))).to(wide if bias is None else bias.dtype)
    return dx, dweight, dbias


def layer_norm_bwd(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    """The op, recorded for whichever derivative is under way."""
    args = grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    tensors = grad_out, input, mean, rstd, weight, bias
    if in_dual_level() or in_functorch():
        if is_differentiated_otherwise(*tensors) or requires_grad(*tensors):
            check_bwd(*args)
            return _formula_of_bwd(*args)
    elif requires_grad(*tensors):
        return RecordedLayerNormBwd.apply(*args)
    elif has_tangent_in_graph(*tensors):
        return _formula_of_bwd(*args)
    return run(_bwd, *args)


def _register() -> None:
    ops = torch.ops.fastln
    register(_op, ops._layer_norm.default, layer_norm)
    register(_fwd, ops._layer_norm_fwd.default, layer_norm_fwd)
    register(_bwd, ops._layer_norm_bwd.default, layer_norm_bwd)
    # Where the gates in C++ send plain tensors in grad mode.
    for name, function in (
        ("_layer_norm_with_grad", behind_gate(layer_norm)),
        ("_layer_norm_fwd_with_grad", behind_gate(layer_norm_fwd)),
        ("_layer_norm_bwd_with_grad", behind_gate(layer_norm_bwd)),
        ("_layer_norm_bwd_recorded", put_right),
    ):
        registrations.impl(name, function, "CompositeImplicitAutograd")


_register()
