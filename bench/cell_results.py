"""The rows of one shape together, what they say of ours beside the others, and parts of tables that say it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from figures import geometric_mean, markdown, shape_text, us

#: torch's own, which everything is measured against.
THEIRS = "F.layer_norm"
#: What is compared with it. (Of the backward it is the op: see bwd_contenders.py.)
OURS = "fastln.layer_norm"
#: The peers, each of which has a column.
PEERS = ("torch.compile", "Liger")

CellKey = tuple[str, int, int]  # dtype, rows, cols


@dataclass(eq=False)
class Result:
    """The rows of one shape by contender. Compared as theirs over ours, and as ours over the floor (the copy)."""

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
    def key(self) -> CellKey:
        return self.ours["dtype"], self.ours["rows"], self.ours["cols"]

    @property
    def label(self) -> str:
        dtype, *shape = self.key
        return f"{dtype} {shape_text(tuple(shape))}"

    @property
    def has_peer(self) -> bool:
        """Whether anyone but ``F.layer_norm`` was measured beside us."""
        return any(row["kind"] == "peer" for row in self.found.values())

    @cached_property
    def best_peer(self) -> str:
        """The fastest of ``F.layer_norm`` and the peers."""
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
    """Results by shape; only of shapes that have ours, ``F.layer_norm`` and the floor."""
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
    return [r for r in results if group in r.ours["groups"]]


def by_dtype(results: list[Result]) -> dict[str, list[Result]]:
    """The results of each dtype, by columns and rows."""
    ordered = sorted(results, key=lambda r: (r.ours["cols"], r.ours["rows"]))
    dtypes = dict.fromkeys(r.ours["dtype"] for r in results)
    return {dtype: [r for r in ordered if r.ours["dtype"] == dtype] for dtype in dtypes}


# ---------------------------------------------------------------------------------------------- text


def name_of(contender: str) -> str:
    return contender if contender == "Liger" else f"`{contender}`"


def ratio(value: float) -> str:
    return f"{value:.2f}x"


def span(values: list[float]) -> str:
    """The least and the largest of some ratios."""
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


# -------------------------------------------------------------------------------------------- tables


def time_cells(result: Result, peers: Iterable[str]) -> list[str]:
    """Times of ours, of ``F.layer_norm``, of the peers that ran, and of the floor."""
    others = [us(result.seconds(name)) if name in result.found else "" for name in (THEIRS, *peers)]
    return [f"**{us(result.ours['seconds'])}**", *others, us(result.floor["seconds"])]


def ratio_cells(result: Result) -> list[str]:
    return [ratio(result.over_f), ratio(result.over_peer) if result.has_peer else ""]


def short_table(results: list[Result], wanted: Iterable[CellKey], floor: str) -> str:
    """The shapes wanted, in their order, and each other one in which a peer is ahead."""
    by_key = {r.key: r for r in results}
    chosen = [by_key[key] for key in wanted if key in by_key]
    chosen += [r for r in results if r.has_peer and r.over_peer < 1 and r not in chosen]
    lines = [[r.label, *time_cells(r, PEERS), *ratio_cells(r)] for r in chosen]
    header = ["rows x cols", "`fastln`", f"`{THEIRS}`", *map(name_of, PEERS), floor, f"over `{THEIRS}`"]
    return markdown([*header, "over best peer"], lines)


def mean_cells(results: list[Result]) -> list[str]:
    """How many shapes, the mean over ``F.layer_norm``, how many had peers, and the mean over the best of those."""
    rivals = [r for r in results if r.has_peer]
    compiled = sum("torch.compile" in r.found for r in rivals)
    over_f = ratio(geometric_mean([r.over_f for r in results]))
    over_peer = ratio(geometric_mean([r.over_peer for r in rivals])) if rivals else ""
    return [str(len(results)), over_f, f"{len(rivals)} ({compiled})", over_peer]


MEAN_HEADER = ["geometric means", "shapes", f"over `{THEIRS}`", "with a peer (`torch.compile`)", "over best peer"]


def with_dtypes(title: str, results: list[Result]) -> list[tuple[str, list[Result]]]:
    """A group, then each of its dtypes."""
    return [(title, results), *((f"of these, {dtype}", chosen) for dtype, chosen in by_dtype(results).items())]


def means_sentence(results: list[Result]) -> str:
    """The geometric means over the main shapes, in words: of all and by dtype."""
    count, over_f, _, over_peer = mean_cells(results)
    peer = f", {over_peer} over the best peer (the fastest of `{THEIRS}`, `torch.compile` and Liger)"
    means = [f"Geometric means over {count} main shapes: {over_f} over `{THEIRS}`{peer if over_peer else ''}"]
    for dtype, chosen in by_dtype(results).items():
        count, over_f, _, over_peer = mean_cells(chosen)
        means.append(f"{dtype} ({count} shapes) {over_f}{f' and {over_peer}' if over_peer else ''}")
    return "; ".join(means) + "."


def peers_ahead(results: list[Result]) -> str:
    """The shapes in which a peer is ahead, worst first; a sentence if there are none."""
    rivals = [r for r in results if r.has_peer]
    behind = sorted((r for r in rivals if r.over_peer < 1), key=lambda r: r.over_peer)
    if not behind:
        return f"In none of {len(rivals)} shapes that have a peer is one ahead." if rivals else ""
    lines = [[r.label, name_of(r.best_peer), f"{r.over_peer:.3f}x"] for r in behind]
    return markdown([f"a peer is ahead ({len(behind)} of {len(rivals)})", "fastest", "over it"], lines)


def ratio_list(title: str, results: list[Result], value: Callable[[Result], float], columns: int = 4) -> str:
    """Shapes and ratios, the largest first, several beside each other."""
    ordered = sorted(results, key=value, reverse=True)
    columns = min(columns, len(ordered))
    pairs = [f"{r.label} | {value(r):.3f}" for r in ordered]
    lines = [pairs[i : i + columns] for i in range(0, len(pairs), columns or 1)]
    lines = [[*line, *[" | "] * (columns - len(line))] for line in lines]
    return markdown(["shape", title] * columns, lines) if lines else ""


# -------------------------------------------------------------------------------------------- causes


@dataclass(frozen=True)
class Cause:
    """Why some shapes are slower than they should be. A shape belongs to the first cause that matches it."""

    rows: str
    matches: Callable[[Result], bool]
    why: str


def row_bytes(result: Result) -> int:
    return result.ours["cols"] * item_bytes(result)


def item_bytes(result: Result) -> int:
    return 4 if result.ours["dtype"] == "float32" else 2


def cause_table(results: list[Result], causes: Iterable[Cause], title: str, value: Callable[[Result], float]) -> str:
    """How many shapes each cause has, from which to which ratio, and the worst of them."""
    left, lines = list(results), []
    for cause in causes:
        chosen = [r for r in left if cause.matches(r)]
        left = [r for r in left if r not in chosen]
        if chosen:
            worst = max(chosen, key=value)
            lines.append([cause.rows, str(len(chosen)), span([value(r) for r in chosen]), worst.label, cause.why])
    if left:
        raise ValueError(f"no cause matches {', '.join(r.label for r in left)}")
    return markdown(["rows", "shapes", title, "worst", "why"], lines, prose=2) if lines else ""
