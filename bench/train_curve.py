"""Trains a small transformer with ``nn.LayerNorm`` and with ``fastln.layer_norm``: are the losses the same?

    python bench/train_curve.py build/training.json [--steps 200] [--device cuda]
    python bench/table.py build/training.json
    python bench/plot.py build/training.json docs/training.svg

Seed, weights and batches are the same in each run, and torch's deterministic algorithms make each run
repeatable, so that runs differ by their layer norm alone. A third run, whose layer norm is computed in float64
and rounded, shows how far roundoff by itself drives two runs apart. The text is the source code of Python's own
standard library, byte by byte, so that nothing has to be downloaded.

The JSON has the form of the benchmark's: of each run the loss and the seconds of every step, the peak memory, and
the largest difference of its losses from those of ``nn.LayerNorm``. On a CPU the model and the number of steps
are smaller.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Before CUDA starts: without a workspace of fixed size cuBLAS promises no repeatable result.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import machine
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastln

TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int


SIZES = {"cuda": Size(512, 4, 8, 256, 32, 200), "cpu": Size(64, 2, 2, 32, 8, 20)}

# ------------------------------------------------------------------------------------------------ norms


class WideLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` in float64, its output and gradients rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.double(), self.bias.double()
        return F.layer_norm(x.double(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


#: The first is what the others are held against.
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "nn.LayerNorm": nn.LayerNorm,
    "fastln": fastln.LayerNorm,
    "float64": WideLayerNorm,
}

# ------------------------------------------------------------------------------------------------ model


class Attention(nn.Module):
    """Causal self-attention, written out: torch's fused kernels are not all repeatable."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.to_qkv = nn.Linear(size.width, 3 * size.width)
        self.to_out = nn.Linear(size.width, size.width)
        self.register_buffer("future", torch.ones(size.context, size.context, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        attention = scores.masked_fill(self.future, float("-inf")).softmax(-1)
        return self.to_out((attention @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, size: Size, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        width = size.width
        self.attention = nn.Sequential(norm(width), Attention(size))
        self.mlp = nn.Sequential(norm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Bytes ``[batch, context]`` to logits of the next byte ``[batch, context, 256]``; norms before each part."""

    def __init__(self, size: Size, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(256, size.width)
        self.position = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(size, norm) for _ in range(size.layers)))
        self.head = nn.Sequential(norm(size.width), nn.Linear(size.width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens) + self.position))


# --------------------------------------------------------------------------------------------- training


def standard_library() -> Tensor:
    """The first megabytes of the standard library's source code, as bytes in a uint8 tensor."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    if len(text) < TEXT_BYTES // 2:
        raise SystemExit(f"this Python has only {len(text)} bytes of its standard library's source: too few")
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(text: Tensor, size: Size) -> Tensor:
    """Random windows of the text, ``[steps, batch, context + 1]``; the same on every call."""
    random = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - size.context - 1, (size.steps, size.batch, 1), generator=random)
    return text[starts + torch.arange(size.context + 1)].long()


def train(name: str, dtype: torch.dtype, size: Size, data: Tensor, device: torch.device) -> dict:
    """Losses, seconds and peak memory of one run. Weights are kept in float32 and used in ``dtype``."""
    torch.manual_seed(0)
    model = Transformer(size, NORMS[name]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for step, batch in enumerate(data.to(device)):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        weights = {key: value.to(dtype) for key, value in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, (batch[:, :-1],))
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(round(time.perf_counter() - start, 6))
    return {
        "suite": "training",
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "losses": losses,
        "step_seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def largest_difference(run: dict, reference: dict) -> float:
    return max(abs(a - b) for a, b in zip(run["losses"], reference["losses"], strict=True))


def compare(dtype: torch.dtype, size: Size, data: Tensor, device: torch.device) -> list[dict]:
    """A run with each layer norm, all from the same weights over the same batches."""
    runs = [train(name, dtype, size, data, device) for name in NORMS]
    for run in runs:
        run["largest_difference"] = largest_difference(run, runs[0])
    return runs


def describe(run: dict) -> str:
    memory = f", peak {run['peak_bytes'] / 2**20:.0f} MiB" if run["peak_bytes"] else ""
    return (
        f"{run['dtype']:<9} {run['name']:<13} loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}, largest "
        f"difference {run['largest_difference']:.2e}, median step {statistics.median(run['step_seconds']) * 1e3:.2f} ms"
        f"{memory}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="default: 200 on a GPU, 20 on a CPU")
    options = parser.parse_args()
    size = SIZES[options.device]
    if options.steps is not None:
        size = Size(**vars(size) | {"steps": options.steps})
    if size.steps < 1:
        parser.error(f"expected --steps of at least 1, got {size.steps}")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which would be timed
    data = batches(standard_library(), size)
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        for run in compare(dtype, size, data, torch.device(options.device)):
            print(describe(run), flush=True)
            runs.append({"extra_info": run, "stats": {"median": statistics.median(run["step_seconds"])}})
    document = {
        "datetime": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine_info": machine.facts() | {"model": vars(size)},
        "benchmarks": runs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
