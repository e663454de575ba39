"""The rows of one cell together, what they say of ours beside the others, and parts of tables that say it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from figures import geometric_mean, shape_text

#: torch's own, which everything is measured against.
THEIRS = "F.layer_norm"
#: What is compared with it. (Of the backward it is the op: see bwd_contenders.py.)
OURS = "fastln.layer_norm"

CellKey = tuple[str, int, int]  # dtype, rows, cols


@dataclass
class Result:
    """The rows of one cell by contender. Cells compare as theirs over ours, and as ours over the floor."""

    found: dict[str, dict]
    past_l2: bool

    def seconds(self, name: str) -> float:
        return self.found[name]["seconds"]

    @cached_property
    def ours(self) -> dict:
        return next(row for row in self.found.values() if row["kind"] == "op")

    @cached_property
    def floor(self) -> dict:
        return next(row for row in self.found.values() if row["kind"] == "floor")

    @property
    def label(self) -> str:
        return f"{self.ours['dtype']} {shape_text((self.ours['rows'], self.ours['cols']))}"

    @property
    def has_peer(self) -> bool:
        """Whether anyone but ``F.layer_norm`` was measured beside us."""
        return any(row["kind"] == "peer" for row in self.found.values())

    @cached_property
    def best_peer(self) -> str:
        return min((n for n, row in self.found.items() if row["kind"] in ("torch", "peer")), key=self.seconds)

    @property
    def over_f(self) -> float:
        return self.seconds(THEIRS) / self.ours["seconds"]

    @property
    def over_peer(self) -> float:
        return self.seconds(self.best_peer) / self.ours["seconds"]

    @property
    def over_floor(self) -> float:
        return self.ours["seconds"] / self.floor["seconds"]


def collect(machine: dict, rows: Iterable[dict]) -> dict[CellKey, Result]:
    """Results by cell; only of cells that have ours, ``F.layer_norm`` and the floor."""
    by_cell: dict[CellKey, dict[str, dict]] = {}
    for row in rows:
        if row["kind"] in ("floor", "torch", "peer", "op"):
            by_cell.setdefault((row["dtype"], row["rows"], row["cols"]), {})[row["name"]] = row
    results = {}
    for key, found in by_cell.items():
        kinds = {row["kind"]: row for row in found.values()}
        if {"op", "torch", "floor"} <= set(kinds):
            size = kinds["floor"]["bytes"]  # the large tensors, and nothing else
            results[key] = Result(found, past_l2=size > machine["gpu"]["l2_bytes"])
    return results


def of_group(results: list[Result], group: str) -> list[Result]:
    """The results of a group, by columns and rows but for the target cells, whose order is that of the targets."""
    chosen = [r for r in results if group in r.ours["groups"]]
    if group != "target":
        dtypes = list(dict.fromkeys(r.ours["dtype"] for r in results))
        chosen.sort(key=lambda r: (dtypes.index(r.ours["dtype"]), r.ours["cols"], r.ours["rows"]))
    return chosen


def name_of(contender: str) -> str:
    return contender if contender == "Liger" else f"`{contender}`"


def ratio(value: float) -> str:
    return f"{value:.2f}x"


def over_peer_text(results: list[Result]) -> str:
    """The geometric mean over the best peer, and in how many cells there was one."""
    rivals = [r.over_peer for r in results if r.has_peer]
    return f"{ratio(geometric_mean(rivals))} ({len(rivals)})" if rivals else ""


def means_sentence(results: list[Result]) -> str:
    """The geometric means over some cells, in words."""
    dtypes = ", ".join(dict.fromkeys(r.ours["dtype"] for r in results))
    means = f"{ratio(geometric_mean([r.over_f for r in results]))} over `F.layer_norm`"
    if over_peer := over_peer_text(results):
        means += f", {over_peer.split(' ')[0]} over the best peer"
    return f"Geometric means over {len(results)} cells ({dtypes}): {means}."


def listing(title: str, items: list[str]) -> str:
    return f"- {title}: {len(items)}" + (f": {', '.join(items)}" if items else "") + "."


def behind_peers(results: list[Result]) -> str:
    """The cells in which a peer is ahead, worst first."""
    behind = sorted((r for r in results if r.over_peer < 1), key=lambda r: r.over_peer)
    items = [f"{r.label} ({name_of(r.best_peer)}, {r.over_peer:.3f}x)" for r in behind]
    return listing(f"Slower than the best peer measured there (of {len(results)} cells)", items)


def peers_sentence(machine: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("peers", {}).items())
    return f" Peers run on {versions}." if versions else ""
