"""Hooks of pytest-benchmark: what the JSON says about the machine, and what it leaves out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The helpers beside this file are imported by name, in every import mode of pytest.
BENCH = str(Path(__file__).resolve().parent)
if BENCH not in sys.path:
    sys.path.insert(0, BENCH)

try:
    import machine
except ImportError as error:
    raise pytest.UsageError(f"the benchmark needs an installed fastln: {error}") from error


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Interrupted, a run still writes the cells that it has measured: the one under way has no data, which
    pytest-benchmark does not expect."""
    if suite := getattr(session.config, "_benchmarksession", None):
        suite.benchmarks = [benchmark for benchmark in suite.benchmarks if benchmark.stats.data]
    return (yield)


def pytest_benchmark_update_machine_info(config, machine_info):
    """The GPU and the versions in place of what identifies the host."""
    machine_info.clear()
    machine_info.update(machine.facts())


def pytest_benchmark_update_commit_info(config, commit_info):
    known = {key: commit_info[key] for key in ("id", "dirty", "time") if key in commit_info}
    commit_info.clear()
    commit_info.update(known)


def pytest_benchmark_update_json(config, benchmarks, output_json):
    for row in output_json["benchmarks"]:
        for key in ("options", "params", "param"):  # `extra_info` says it in a form that can be read
            row.pop(key, None)
        stats = row["stats"]
        for key, value in stats.items():
            if isinstance(value, float) and key != "ops":
                stats[key] = round(value, 12)  # picoseconds are plenty
        stats["data"] = [round(value, 12) for value in stats.get("data", [])]
