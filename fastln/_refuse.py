"""How a mistake is told. The fakes use it with the texts of ``src/bindings_*.cpp``, word for word, so that a
mistake reads the same in eager, fake and compiled mode."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor


def refuse(op: str, text: str) -> NoReturn:
    """Raises RuntimeError for the op ``fastln::<op>``; ``text`` says what was expected and what came."""
    raise RuntimeError(f"fastln::{op}: {text}")


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` as messages have it: ``float16``."""
    return str(dtype).removeprefix("torch.")


def check_types(op: str, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> None:
    """Raises TypeError, as ``F.layer_norm`` does, if an argument of ``fastln::<op>`` is of no type that it takes."""

    def check(name: str, value: Any, fits: bool, expected: str) -> None:
        if not fits:
            raise TypeError(f"fastln::{op}: expected {name} to be {expected}, got {type(value).__name__}") from None

    check("input", input, isinstance(input, Tensor), "a Tensor")
    for name, value in (("weight", weight), ("bias", bias)):
        check(name, value, value is None or isinstance(value, Tensor), "a Tensor or None")
    is_sequence = isinstance(normalized_shape, (Sequence, Tensor)) and not isinstance(normalized_shape, str)
    check("normalized_shape", normalized_shape, is_sequence, "a sequence of ints")
    for size in normalized_shape:
        is_int = isinstance(size, (int, torch.SymInt)) or hasattr(size, "__index__")
        check("each item of normalized_shape", size, is_int, "an int")
    is_number = isinstance(eps, (float, int, torch.SymFloat, torch.SymInt, Tensor, numbers.Real))
    check("eps", eps, is_number, "a float")
