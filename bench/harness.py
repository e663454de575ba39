"""How the benchmark makes pytest-benchmark record seconds that were measured in another way than its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastln import _timing


class MeasuredClock:
    """A clock that stands still except for the seconds that the measurements it runs come to.

    pytest-benchmark reads its timer before and after each round. With this one as the timer, and
    :meth:`run` as what a round does, a round lasts what the measurement found: what one call took on the
    device, say.
    """

    __name__ = "measured_clock"  # pytest-benchmark prints a timer's name

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def run(self, measure: Callable[[], float]) -> None:
        """Measure once, and move on by the seconds found."""
        self._now += measure()


CLOCK = MeasuredClock()


def record(benchmark, measure: Callable[[], float], rounds: int, warm_up: int = 0) -> float | None:
    """Let ``benchmark`` record the seconds of ``measure()``; returns their median (None with --benchmark-disable).

    The test must be marked ``@pytest.mark.benchmark(timer=CLOCK)``.
    """
    benchmark.pedantic(CLOCK.run, args=(measure,), rounds=rounds, warmup_rounds=warm_up)
    return benchmark.stats.stats.median if benchmark.enabled else None


def record_device_time(benchmark, call: _timing.Call, rotation: Sequence[_timing.Arguments]) -> float | None:
    """:func:`record` of ``call``'s device seconds, cold."""
    with _timing.DeviceTimer(call, rotation) as timer:
        benchmark.extra_info |= {"inputs": len(rotation), "calls_in_a_replay": timer.calls}
        return record(benchmark, timer.replay, _timing.REPLAYS, _timing.WARM_UP)
