"""Loads the compiled library, which registers the ops with torch, and reads what it says of itself."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch

_PATH = Path(__file__).with_name("libfastln.so")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One row of the list of kernels (``src/kernels.h``).

    Attributes:
        name: The op is ``torch.ops.fastln.layer_norm_<name>``.
        element: dtype of input and output, ``"float16"`` or ``"float32"``.
        accumulate: dtype of every sum, of mean, variance and rstd.
        items: Elements that one GPU thread holds.
        access: Elements that one GPU load or store moves.
    """

    name: str
    element: str
    accumulate: str
    items: int
    access: int

    @property
    def qualname(self) -> str:
        """The op's name as error messages have it."""
        return f"fastln::layer_norm_{self.name}"

    @property
    def dtype(self) -> torch.dtype:
        """dtype of input and output."""
        return getattr(torch, self.element)

    @property
    def acc_dtype(self) -> torch.dtype:
        """dtype that the kernel accumulates in."""
        return getattr(torch, self.accumulate)

    @property
    def op(self) -> torch._ops.OpOverloadPacket:
        """The op, with the overloads ``default``, ``scalar`` and ``out``."""
        return getattr(torch.ops.fastln, f"layer_norm_{self.name}")

    @property
    def twin(self) -> torch._ops.OpOverloadPacket:
        """The same kernels under the private name that has no autograd (see ``src/bindings_named.cpp``)."""
        return getattr(torch.ops.fastln, f"_layer_norm_{self.name}")


def _load() -> ctypes.CDLL:
    if not _PATH.exists():
        raise ImportError(
            f"fastln is not built: {_PATH} is missing. Install a wheel, or build one with `pip install .`; "
            "an import from an unbuilt checkout cannot work."
        )
    torch.ops.load_library(str(_PATH))
    library = ctypes.CDLL(str(_PATH))
    library.fastln_build_info.restype = ctypes.c_char_p
    return library


library = _load()

registrations = torch.library.Library("fastln", "IMPL")
"""What Python gives the ops that the library defines; it holds as long as this object lives."""


@functools.cache
def _facts() -> str:
    return library.fastln_build_info().decode()


def build_info() -> dict[str, Any]:
    """What this binary was built from and for.

    Returns:
        A new dict with ``version``; ``arch_list`` (as ``TORCH_CUDA_ARCH_LIST`` had it), ``archs`` (compute
        capabilities with machine code) and ``ptx`` (those with PTX, which newer GPUs compile at load);
        ``nvcc``; ``torch_built`` (the torch built against) and ``torch_target`` (the oldest torch it runs
        under); ``kernels`` (the list of kernels, a dict each).
    """
    return json.loads(_facts())


KERNELS: tuple[Kernel, ...] = tuple(Kernel(**row) for row in build_info()["kernels"])
"""Every named kernel, in the order of ``src/kernels.h``."""
