"""One training step of a layer norm by itself: forward, ``backward()``, and what is left of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cell_results import OURS, THEIRS
from norm_cells import Cell

import fastln
from fastln import _compare

NORMS = {THEIRS: F.layer_norm, OURS: fastln.layer_norm}


@dataclass
class Step:
    """Leaves that need gradients, and the gradient of the output: a step is one call of it."""

    norm: Callable[..., torch.Tensor]
    x: torch.Tensor  # [rows, cols]
    weight: torch.Tensor  # [cols]
    bias: torch.Tensor  # [cols]
    dy: torch.Tensor  # [rows, cols]

    def __call__(self) -> None:
        self.x.grad = self.weight.grad = self.bias.grad = None
        self.norm(self.x, self.x.shape[-1:], self.weight, self.bias, _compare.EPS).backward(self.dy)

    @property
    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        return self.x.grad, self.weight.grad, self.bias.grad


def make(name: str, cell: Cell) -> Step:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    x, dy = torch.randn(2, *cell.shape, dtype=cell.dtype, device=device)
    weight, bias = _compare.random_affine(cell.cols, cell.dtype, device)
    leaves = (t.clone().requires_grad_() for t in (x, weight, bias))
    return Step(NORMS[name], *leaves, dy)


def wall_seconds(step: Step) -> float:
    """Seconds of one step, the device's work waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(step: Step) -> int:
    """Bytes that a step has allocated at its worst moment, beyond what was allocated before it."""
    step.x.grad = step.weight.grad = step.bias.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
