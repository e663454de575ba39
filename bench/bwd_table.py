"""The tables of the backward: every cell, geometric means, the cells that miss a target, and a step's cost."""

from __future__ import annotations

from collections.abc import Callable

from cell_results import (
    THEIRS,
    Result,
    behind_peers,
    collect,
    listing,
    means_sentence,
    name_of,
    of_group,
    over_peer_text,
    peers_sentence,
    ratio,
)
from figures import caption, geometric_mean, markdown, shape_text, us

#: Titles of the groups of cells in norm_cells.py.
GROUPS = {
    "target": "Cells with a target",
    "dx": "dx alone, the same cells",
    "sweep": "64 to 128 MiB of input, every number of columns",
    "batch": "A few hundred to two thousand rows",
    "rows": "From one row to a million",
}

FLOOR = "`x+dy→dx` is `torch.add` of x and dy into dx, which is the floor."

#: The peers that have a column of their own.
PEERS = ("torch.compile", "Liger")


def both(machine: dict, rows: list[dict]) -> tuple[list[Result], list[Result]]:
    """The results of the whole backward, and of dx alone."""
    whole, alone = (collect(machine, (row for row in rows if row["dx_alone"] is wanted)) for wanted in (False, True))
    return list(whole.values()), list(alone.values())


def groups_of(whole: list[Result], alone: list[Result]) -> list[tuple[str, list[Result]]]:
    """Title and results of each group that has any."""
    found = [(title, of_group([*whole, *alone], group)) for group, title in GROUPS.items()]
    return [(title, chosen) for title, chosen in found if chosen]


# --------------------------------------------------------------------------------------------- parts


def cell_table(results: list[Result]) -> str:
    """Every cell of a group; a peer that ran in none of them has no column."""
    peers = [name for name in PEERS if any(name in r.found for r in results)]
    header = ["rows x cols", "`fastln`", "`F.layer_norm`", *map(name_of, peers), "`x+dy→dx`"]
    header += ["over `F.layer_norm`", *(["over best peer"] if peers else []), "time in floors", "target", "met", "GB/s"]
    lines = []
    for r in results:
        times = [us(r.seconds(name)) if name in r.found else "" for name in (THEIRS, *peers)]
        ratios = [ratio(r.over_f), *([ratio(r.over_peer) if r.has_peer else ""] if peers else [])]
        target = [us(r.ours["target_seconds"]), "yes" if r.ours["target_met"] else "**no**"]
        cells = [f"**{us(r.ours['seconds'])}**", *times, us(r.floor["seconds"]), *ratios, f"{r.over_floor:.3f}"]
        lines.append([r.label, *cells, *target, f"{r.ours['gb_per_second']:.0f}"])
    return markdown(header, lines)


def mean_line(title: str, results: list[Result]) -> list[str]:
    met = sum(r.ours["target_met"] for r in results)
    return [
        title,
        str(len(results)),
        ratio(geometric_mean([r.over_f for r in results])),
        over_peer_text(results),
        f"{geometric_mean([r.over_floor for r in results]):.3f}",
        f"{met} of {len(results)}",
    ]


def mean_table(whole: list[Result], alone: list[Result]) -> str:
    header = [
        "geometric means",
        "cells",
        "over `F.layer_norm`",
        "over best peer (cells)",
        "time in floors",
        "targets met",
    ]
    groups = groups_of(whole, alone)
    if whole:
        groups.append(("All cells but dx alone, each once", whole))
    return markdown(header, [mean_line(*group) for group in groups])


def over_target(result: Result) -> float:
    return result.ours["seconds"] / result.ours["target_seconds"]


def missed_targets(results: list[Result]) -> str:
    """The cells that miss their target, worst first."""
    missed = sorted((r for r in results if not r.ours["target_met"]), key=over_target, reverse=True)
    title = f"Over 1.15 floors + 2 µs (of {len(results)} cells; time in targets)"
    return listing(title, [f"{r.label} ({over_target(r):.3f})" for r in missed])


def misses(whole: list[Result], alone: list[Result]) -> str:
    lines = [behind_peers(whole), missed_targets(whole)] if whole else []
    if alone:
        lines += ["- dx alone:", *(f"  {line}" for line in (behind_peers(alone), missed_targets(alone)))]
    return "\n".join(lines)


def step_table(rows: list[dict], kind: str, title: str, figure: Callable[[dict], float], text: Callable) -> str:
    """A step with ``F.layer_norm`` and with ours, from the rows of one kind; ``figure`` is what to compare."""
    steps: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == kind:
            label = f"{row['dtype']} {shape_text((row['rows'], row['cols']))}"
            steps.setdefault(label, {})["theirs" if row["name"] == THEIRS else "ours"] = figure(row)
    lines = [
        [label, text(found["theirs"]), text(found["ours"]), f"{found['ours'] / found['theirs']:.3f}"]
        for label, found in steps.items()
        if len(found) == 2
    ]
    return markdown([title, "`F.layer_norm`", "`fastln`", "ours over theirs"], lines) if lines else ""


def host_table(rows: list[dict]) -> str:
    return step_table(rows, "host", "host µs of forward and `backward()`", lambda row: row["seconds"], us)


def memory_table(rows: list[dict]) -> str:
    title = "peak bytes of forward and `backward()`"
    return step_table(rows, "memory", title, lambda row: row["peak_bytes"], "{:,}".format)


# ----------------------------------------------------------------------------------------- documents


def sentence(machine: dict) -> str:
    return f"{caption(machine, FLOOR)}{peers_sentence(machine)} Weight and bias have the dtype of x."


def summary(rows: list[dict], whole: list[Result], alone: list[Result]) -> list[str]:
    """Geometric means, misses, and what is no cell of its own."""
    parts = [mean_table(whole, alone), misses(whole, alone)] if whole or alone else []
    return [part for part in (*parts, host_table(rows), memory_table(rows)) if part]


def document(machine: dict, rows: list[dict]) -> str:
    whole, alone = both(machine, rows)
    tables = [f"### Backward: {title}\n\n{cell_table(chosen)}" for title, chosen in groups_of(whole, alone)]
    return "\n\n".join([sentence(machine), *summary(rows, whole, alone), *tables])


def summary_document(machine: dict, rows: list[dict]) -> str:
    return "\n\n".join(summary(rows, *both(machine, rows)))


def short_document(machine: dict, rows: list[dict]) -> str:
    """The cells that have a target, and the geometric means over them."""
    targets = of_group(both(machine, rows)[0], "target")
    parts = [cell_table(targets), means_sentence(targets)] if targets else []
    return "\n\n".join([sentence(machine), *parts])
