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


def markdown(header: list[str], lines: list[list[str]], prose: int = 0) -> str:
    """A Markdown table: the first column to the left, the others to the right but for the last few, of prose."""
    table = [header, ["---", *["--:"] * (len(header) - 1 - prose), *["---"] * prose], *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def shape_text(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < 100e-6 else f"{seconds * 1e6:.1f}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


#: How device times are measured; docs/performance.md says it at length.
METHOD = (
    "Device microseconds a call, cold: median of 11 replays of a CUDA graph that rotates over inputs of four times the "
    "L2 cache."
)


def fastln_text(machine: dict) -> str:
    """The version that was measured, and the commit it was built from where the build knows."""
    commit = machine.get("build", {}).get("commit", "unknown")
    return f"fastln {machine['fastln']}" + ("" if commit == "unknown" else f" ({commit})")


def machine_text(machine: dict) -> str:
    """The GPU and the versions that the figures are of."""
    gpu, peers = machine["gpu"], machine.get("peers", {})
    compared = "".join(f", {name} {version}" for name, version in peers.items())
    return (
        f"{gpu['name']} ({gpu['multiprocessors']} SMs, {gpu['l2_bytes'] / 2**20:.0f} MB L2, driver {gpu['driver']}), "
        f"torch {machine['torch']}{compared}, {fastln_text(machine)} built with nvcc {machine['build']['nvcc']}, "
        f"{machine['date']}."
    )


def joined(*parts: str) -> str:
    """The parts that say something, as paragraphs."""
    return "\n\n".join(part for part in parts if part)
