"""How a mistake is told. The fakes use it with the texts of ``src/bindings_*.cpp``, word for word, so that a
mistake reads the same in eager, fake and compiled mode."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastln._transforms import is_dual_or_wrapped


def refuse(op: str, text: str) -> NoReturn:
    """Raises RuntimeError for the op ``fastln::<op>``; ``text`` says what was expected and what came."""
    raise RuntimeError(f"fastln::{op}: {text}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` as messages have it: ``float16``."""
    return str(dtype).removeprefix("torch.")


def check_types(op: str, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> None:
    """Raises TypeError, as ``F.layer_norm`` does, if an argument of ``fastln::<op>`` is of no type that it takes.

    As there, ``normalized_shape`` is a list or a tuple, a size may be whatever is an int (a NumPy integer, or a tensor
    of one), and eps whatever is a number (a tensor of no dimension too, unless it is to be differentiated).
    """

    def check(name: str, value: Any, fits: bool, expected: str) -> None:
        if not fits:
            raise TypeError(f"fastln::{op}: expected {name} to be {expected}, got {type(value).__name__}") from None

    check("input", input, isinstance(input, Tensor), "a Tensor")
    for name, value in (("weight", weight), ("bias", bias)):
        check(name, value, value is None or isinstance(value, Tensor), "a Tensor or None")
    check("normalized_shape", normalized_shape, isinstance(normalized_shape, (list, tuple)), "a sequence of ints")
    for size in normalized_shape:
        check("each item of normalized_shape", size, _is_int(size), "an int")
    check("eps", eps, _is_number(eps), "a float")


def _is_int(size: Any) -> bool:
    if isinstance(size, Tensor):
        dtype = size.dtype
        return size.numel() == 1 and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    if isinstance(size, bool):
        return False
    return isinstance(size, (int, torch.SymInt)) or hasattr(size, "__index__")


def _is_number(eps: Any) -> bool:
    if isinstance(eps, Tensor):
        if eps.dim() != 0 or eps.requires_grad or eps.dtype.is_complex:
            return False
        return torch.compiler.is_compiling() or not is_dual_or_wrapped(eps)
    return isinstance(eps, (float, int, torch.SymFloat, torch.SymInt, numbers.Real))


def as_schema(
    op: str, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any
) -> tuple[Sequence[int], float]:
    """``normalized_shape`` and ``eps`` as ops take them, of what ``check_types`` lets pass.

    Raises:
        TypeError: ``check_types`` does not.
        RuntimeError: A number is larger than any size, or any float, can be.
    """
    check_types(op, input, normalized_shape, weight, bias, eps)
    shape = [s if isinstance(s, (int, torch.SymInt)) else operator.index(s) for s in normalized_shape]
    if any(isinstance(s, int) and not -(2**63) <= s < 2**63 for s in shape):
        refuse_shape(op, shape, input.shape)
    if isinstance(eps, (torch.SymFloat, torch.SymInt)):
        return shape, eps
    try:
        return shape, float(eps)
    except OverflowError:
        refuse(op, f"expected eps within the range of a float, got an int of {eps.bit_length()} bits")


def refuse_shape(op: str, normalized_shape: Sequence[int], shape: Sequence[int]) -> NoReturn:
    """Refuses an input of this shape."""
    wanted = f"expected input whose last dimensions are normalized_shape {list(normalized_shape)}"
    refuse(op, f"{wanted}, got shape {list(shape)}")
