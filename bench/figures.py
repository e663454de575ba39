"""Reading the JSON of the benchmark, and writing figures as text."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path


def load(path: Path) -> tuple[dict, list[dict]]:
    """What the JSON says of machine and versions, and its rows, each with ``seconds`` and all extra_info."""
    document = json.loads(path.read_text())
    rows = [
        {"suite": "named"} | row["extra_info"] | {"seconds": row["stats"]["median"]} for row in document["benchmarks"]
    ]
    return document["machine_info"] | {"date": document["datetime"][:10]}, rows


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    table = [header, ["---", *["--:"] * (len(header) - 1)], *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def shape_text(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < 100e-6 else f"{seconds * 1e6:.1f}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


#: What the floor of the forward is.
COPY = "`copy` reads x and writes it once, which is the floor."


def caption(machine: dict, floor: str) -> str:
    gpu = machine["gpu"]
    return (
        f"{gpu['name']} ({gpu['multiprocessors']} SMs, {gpu['l2_bytes'] / 2**20:.0f} MB L2, driver {gpu['driver']}), "
        f"torch {machine['torch']}, fastln {machine['fastln']} built with nvcc {machine['build']['nvcc']}, "
        f"{machine['date']}. Device microseconds a call, cold: median of 11 replays of a CUDA graph that rotates "
        f"over inputs of four times the L2 cache. {floor}"
    )
