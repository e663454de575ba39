"""Who runs in the forward benchmark, on which shapes, and what counts as right."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

import fastln
from fastln import _compare, _timing, report
from fastln._compare import Contender

#: Beside the tutorial's shapes: many short rows, and so few rows that latency is all.
SHAPES = (*report.SHAPES, (32768, 256), (65536, 128), (128, 4096), (16, 4096), (1, 8192))
DTYPES = (torch.float16, torch.float32)

#: weight and bias of the `.scalar` overloads, exact in float16.
SCALE, SHIFT = 1.25, -0.5


@dataclass
class Workload:
    """Inputs of one shape and dtype, enough of them to be cold, with one weight and bias."""

    inputs: list[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def rotation(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return [(x, self.weight, self.bias) for x in self.inputs]


@functools.lru_cache(maxsize=1)  # the tests run shape by shape, so one is enough
def workload(shape: tuple[int, int], dtype: torch.dtype) -> Workload:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    inputs = _timing.random_inputs(*shape, dtype, device)
    return Workload(inputs, *_compare.random_affine(shape[1], dtype, device))


def forward(shape: tuple[int, int], dtype: torch.dtype) -> list[Contender]:
    """The copy, which is the floor, then ``F.layer_norm``, ``naive`` and the ops of this dtype.

    On the tutorial's shapes the `.scalar` overloads run too: that is what the tutorial computes.
    """
    kernels = [k for k in fastln.KERNELS if k.dtype == dtype]
    rows = [Contender("copy", dtype, "", copy, 0.0, exact=False), *_compare.contenders(kernels, dtype)]
    if shape in report.SHAPES:
        rows += [scalar_form(k) for k in kernels]
    return rows


def copy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x read once and written once: no layer norm can move less."""
    return torch.empty_like(x).copy_(x)


def scalar_form(kernel: fastln.Kernel) -> Contender:
    op = kernel.op.scalar
    return Contender(
        f"layer_norm_{kernel.name}.scalar",
        kernel.dtype,
        kernel.accumulate,
        lambda x, weight, bias: op(x, SCALE, SHIFT),
        _compare.TOLERANCE[kernel.dtype, kernel.accumulate],
    )


def kind(contender: Contender) -> str:
    """What sort of row this is in the results: floor, torch, op or scalar."""
    if contender.name == "copy":
        return "floor"
    if not contender.name.startswith("layer_norm_"):
        return "torch"
    return "scalar" if contender.name.endswith(".scalar") else "op"


def bytes_moved(contender: Contender, x: torch.Tensor) -> int:
    """Bytes that the call must move: weight and bias count where they are tensors."""
    if kind(contender) in ("floor", "scalar"):
        return 2 * x.numel() * x.element_size()
    return _compare.bytes_moved(x)


def verify(contender: Contender, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> float:
    """The largest error of one call; raises if it is more than the contender may have."""
    y = contender.call(x, weight, bias)
    if kind(contender) == "floor":
        assert torch.equal(y, x), "a copy differs from its source"
        return 0.0
    if kind(contender) == "scalar":
        weight, bias = torch.full_like(weight, SCALE), torch.full_like(bias, SHIFT)
    result = _compare.check(contender, y, x, weight, bias)
    assert result.right, f"{contender.name} is off by up to {result.error:.3g} from float64"
    return result.error
