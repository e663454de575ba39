"""Who computes a layer norm inside ``torch.compile``: our op, or code that Inductor writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastln import _formula
from fastln._autocast import autocast_arguments
from fastln._norm_fakes import FLOATING, stats_dtype
from fastln._refuse import check_types
from fastln._transforms import in_derivative, needs_backward

_MODES = ("op", "inductor")
_op = torch.ops.fastln.layer_norm.default


class CompileMode(NamedTuple):
    """Who computes ``fastln.layer_norm`` in a compiled graph: ``"op"`` or ``"inductor"``."""

    inference: str
    """Where nothing needs a gradient."""
    training: str
    """Where something does; forward and backward go together."""


# Measured on an H200 with transformers of width 768 to 4096 (docs/performance.md): with the op, inference is 1 to 3 %
# slower than with Inductor's fusion.
_mode = CompileMode("inductor", "op")


def compile_mode() -> CompileMode:
    """The mode in force."""
    return _mode


def set_compile_mode(inference: str | None = None, training: str | None = None) -> CompileMode:
    """Chooses who computes ``fastln.layer_norm`` and ``fastln.LayerNorm`` inside ``torch.compile``.

    ``"op"`` calls our kernel, which Inductor cannot fuse with its neighbours. ``"inductor"`` leaves the layer norm to
    Inductor, as ``F.layer_norm`` is, which can. At first inference is left to Inductor and training is not, as measured
    best on whole models. Compiled code follows a change by compiling anew; eager code,
    ``torch.export`` and calls of ``torch.ops.fastln.layer_norm`` always run our kernel, and derivatives that a compiled
    function takes by ``torch.func`` or forward mode always go through our formula.

    The environment variable ``FASTLN_COMPILE`` does the same from the start of the process, as in
    ``FASTLN_COMPILE=inductor`` or ``FASTLN_COMPILE=inference=inductor,training=op``.

    Args:
        inference: For calls of which nothing needs a gradient; None leaves it as it is.
        training: For the others.

    Returns:
        The mode that was in force before, to give back later: ``set_compile_mode(*before)``.

    Raises:
        ValueError: A mode is neither ``"op"`` nor ``"inductor"``.
    """
    global _mode
    for name, mode in (("inference", inference), ("training", training)):
        if mode is not None and mode not in _MODES:
            raise ValueError(f'fastln.set_compile_mode: expected {name} to be "op" or "inductor", got {mode!r}')
    before = _mode
    _mode = CompileMode(inference or before.inference, training or before.training)
    return before


def layer_norm_in_graph(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """``fastln.layer_norm`` while torch.compile or torch.export traces it."""
    if not _have_usual_types(input, normalized_shape, weight, bias, eps):
        check_types("layer_norm", input, normalized_shape, weight, bias, eps)
    if input.is_nested:  # as in eager
        return torch.layer_norm(input, normalized_shape, weight, bias, eps)
    if _in_derivative() and _is_good(input, normalized_shape, weight, bias):
        # As in eager. Of torch's own layer norm the higher derivatives are wrong, and in forward mode it has none here.
        input, weight, bias = autocast_arguments(input, weight, bias)
        return _formula.layer_norm(input, normalized_shape, weight, bias, eps)
    mode = _mode.training if needs_backward(input, weight, bias) else _mode.inference
    # Its public reader, is_exporting(), is always true to Dynamo of torch 2.11.
    exporting = torch.compiler._is_exporting_flag
    if mode == "op" or exporting or not _is_good(input, normalized_shape, weight, bias):
        return _op(input, normalized_shape, weight, bias, eps)  # which refuses what is not good
    input, weight, bias = autocast_arguments(input, weight, bias)  # before the dtypes are looked at, as in eager
    dtype = input.dtype
    if any(t is not None and t.dtype != dtype for t in (weight, bias)):  # more than F.layer_norm takes
        wide = stats_dtype(input)
        input, weight, bias = input.to(wide), _to(weight, wide), _to(bias, wide)
        return torch.layer_norm(input, normalized_shape, weight, bias, eps).to(dtype)
    return torch.layer_norm(input, normalized_shape, weight, bias, eps)


def _in_derivative() -> bool:
    return in_derivative()


# Dynamo cannot trace the question. It need not: a graph is guarded by the transforms around it. (This is what
# torch.compiler.assume_constant_result() does, which imports Dynamo first.)
_in_derivative._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _have_usual_types(input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps) -> bool:
    """What check_types() asks, less what every Dynamo has not learnt to trace of a symbolic size."""
    tensors = (input, *(t for t in (weight, bias) if t is not None))
    has_ints = isinstance(shape, (list, tuple)) and all(isinstance(s, int) and not isinstance(s, bool) for s in shape)
    return has_ints and isinstance(eps, float) and all(isinstance(t, Tensor) for t in tensors)


def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(dtype)


def _is_good(input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None) -> bool:
    if len(shape) == 0 or input.dim() < len(shape) or list(input.shape[-len(shape) :]) != list(shape):
        return False
    return input.dtype in FLOATING and all(
        list(t.shape) == list(shape) and t.dtype in FLOATING and t.device == input.device
        for t in (weight, bias)
        if t is not None
    )


def _from_environment(text: str) -> None:
    try:
        chosen = dict(part.split("=") for part in text.split(",")) if "=" in text else dict.fromkeys(_NAMES, text)
        if not set(chosen) <= set(_NAMES):
            raise ValueError
        set_compile_mode(**chosen)
    except ValueError:
        wanted = '"op", "inductor" or "inference=inductor,training=op"'
        raise ValueError(f'fastln: expected FASTLN_COMPILE to be {wanted}, got "{text}"') from None


_NAMES = CompileMode._fields
if "FASTLN_COMPILE" in os.environ:
    _from_environment(os.environ["FASTLN_COMPILE"])
