"""What the results say about the machine and the versions they come from, and not which machine it was."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess

import torch

from fastln import report


def facts() -> dict:
    """GPU, driver and versions, in a form that JSON holds."""
    found = report.versions() | {"processor": platform.machine(), "system": platform.system()}
    found["peers"] = peer_versions()
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        found["gpu"] = report.device_facts(device) | {"driver": driver_version()}
    return found


def peer_versions() -> dict[str, str]:
    """Versions of what the peers of layer_norm are made with, of those that are installed."""
    found = {}
    for name in ("triton", "liger-kernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def driver_version() -> str:
    """The version of the NVIDIA driver, which torch does not know."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return "unknown"
