"""How the benchmark makes pytest-benchmark record device seconds, and what torch does not know of the machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from fastln import _timing


class DeviceClock:
    """A clock that stands still except for the device time of the replays it runs.

    pytest-benchmark reads its timer before and after each round. With this one as the timer, and
    :meth:`replay` as what a round does, a round lasts what one call took on the device.
    """

    __name__ = "device_clock"  # pytest-benchmark prints a timer's name

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def replay(self, timer: _timing.DeviceTimer) -> None:
        """Replay the graph once, and move on by the device seconds a call."""
        self._now += timer.replay()


CLOCK = DeviceClock()


def record_device_time(benchmark, call: _timing.Call, rotation: Sequence[_timing.Arguments]) -> float | None:
    """Let ``benchmark`` record ``call``'s device seconds; returns their median (None with --benchmark-disable).

    The test must be marked ``@pytest.mark.benchmark(timer=CLOCK)``.
    """
    with _timing.DeviceTimer(call, rotation) as timer:
        benchmark.extra_info |= {"inputs": len(rotation), "calls_in_a_replay": timer.calls}
        benchmark.pedantic(CLOCK.replay, args=(timer,), rounds=_timing.REPLAYS, warmup_rounds=_timing.WARM_UP)
    return benchmark.stats.stats.median if benchmark.enabled else None


def driver_version() -> str:
    """The version of the NVIDIA driver, which torch does not know."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return "unknown"
