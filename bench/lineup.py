"""Who is compared in one part of the benchmark, who of them runs in which cell, and how they came out there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from cell_results import THEIRS
from harness import record_device_time
from norm_cells import Cell

from fastln import _timing

#: With FASTLN_BENCH_PEERS=all in the environment the peers run in every cell, which takes minutes more.
EVERYWHERE = os.environ.get("FASTLN_BENCH_PEERS") == "all"


@dataclass
class Lineup:
    """The contenders of one part of the benchmark, and the medians that this session measured."""

    suite: str
    #: Makes each contender's call for a cell, in the order in which they run: the floor first, then torch's own,
    #: and ours last, because it is compared with the others.
    factories: dict[str, Callable[[Cell], _timing.Call]]
    #: In which cells a peer runs. Peers need compilers of their own, which take seconds a cell.
    peers: dict[str, Callable[[Cell], bool]]
    #: The arguments that the calls rotate over in a cell.
    rotation: Callable[[Cell], Sequence[_timing.Arguments]]
    medians: dict[tuple[str, Cell], float] = field(default_factory=dict)

    @property
    def floor(self) -> str:
        return next(iter(self.factories))

    @property
    def ours(self) -> str:
        return next(reversed(self.factories))

    def names(self, cell: Cell) -> list[str]:
        """Who runs in this cell."""
        return [name for name in self.factories if name not in self.peers or EVERYWHERE or self.peers[name](cell)]

    def kind(self, name: str) -> str:
        """What sort of row this is in the results: floor, torch, op or peer."""
        return {self.floor: "floor", THEIRS: "torch", self.ours: "op"}.get(name, "peer")

    @contextlib.contextmanager
    def peers_may_fail(self, name: str) -> Iterator[None]:
        """Skips the test when a peer fails: that is no fault of ours."""
        try:
            yield
        except Exception as error:
            if self.kind(name) != "peer":
                raise
            text = str(error).strip() or type(error).__name__
            pytest.skip(f"{name}: {text.splitlines()[0][:200]}")

    def record(self, benchmark, name: str, cell: Cell, call: _timing.Call) -> float | None:
        """The median that ``benchmark`` recorded (see :func:`harness.record_device_time`), kept to compare with."""
        seconds = record_device_time(benchmark, call, self.rotation(cell))
        if seconds is not None:
            self.medians[name, cell] = seconds
        return seconds

    def median(self, name: str, cell: Cell) -> float:
        """The median that this session measured for ``name``, measured now if its test did not run."""
        if (name, cell) not in self.medians:
            self.medians[name, cell] = _timing.time_call(self.factories[name](cell), self.rotation(cell))
        return self.medians[name, cell]

    def best_peer(self, cell: Cell) -> tuple[str, float]:
        """Name and seconds of the fastest of ``F.layer_norm`` and the peers that this session measured here."""
        measured = {THEIRS: self.median(THEIRS, cell)}
        measured |= {name: self.medians[name, cell] for name in self.peers if (name, cell) in self.medians}
        return min(measured.items(), key=lambda item: item[1])

    def facts(self, name: str, cell: Cell, seconds: float, nbytes: int) -> dict[str, object]:
        """What ``extra_info`` says of each contender in a cell."""
        found: dict[str, object] = {
            "suite": self.suite,
            "name": name,
            "kind": self.kind(name),
            "groups": list(cell.groups),
            "rows": cell.rows,
            "cols": cell.cols,
            "dtype": cell.dtype_name,
            "bytes": nbytes,
            "gb_per_second": nbytes / seconds / 1e9,
            "speedup_over_layer_norm": self.median(THEIRS, cell) / seconds,
            "time_over_floor": seconds / self.median(self.floor, cell),
        }
        if name == self.ours:
            peer, peer_seconds = self.best_peer(cell)
            found |= {"best_peer": peer, "speedup_over_best_peer": peer_seconds / seconds}
        return found
