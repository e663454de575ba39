"""How a mistake is told. The fakes use it with the texts of ``src/bindings_*.cpp``, word for word, so that a
mistake reads the same in eager, fake and compiled mode."""

from __future__ import annotations

from typing import NoReturn

import torch


def refuse(op: str, text: str) -> NoReturn:
    """Raises RuntimeError for the op ``fastln::<op>``; ``text`` says what was expected and what came."""
    raise RuntimeError(f"fastln::{op}: {text}")


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` as messages have it: ``float16``."""
    return str(dtype).removeprefix("torch.")
