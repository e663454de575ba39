"""The tables of ``fastln.layer_norm``: every cell, geometric means, and the cells that miss a target."""

from __future__ import annotations

from cell_results import (
    OURS,
    THEIRS,
    CellKey,
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
from figures import COPY, caption, geometric_mean, markdown, shape_text, us

#: Titles of the groups of cells in norm_cells.py.
GROUPS = {
    "target": "Cells with a target",
    "dtypes": "The same shapes in the other dtypes",
    "sweep": "64 to 128 MiB of input, every number of columns",
    "few rows": "Few rows",
    "odd": "Odd numbers of columns",
}

#: Past L2, a cell should take at most this many times the copy, for columns in this range.
COPY_LIMIT = 1.03
COPY_COLS = range(128, 65536 + 1)


# ------------------------------------------------------------------------------------------- parts


def cell_table(results: list[Result]) -> str:
    header = ["rows x cols", "`fastln`", "`F.layer_norm`", "best peer", "", "copy"]
    header += ["over `F.layer_norm`", "over best peer", "time in copies", "GB/s"]
    lines = [
        [
            r.label,
            f"**{us(r.seconds(OURS))}**",
            us(r.seconds(THEIRS)),
            us(r.seconds(r.best_peer)),
            name_of(r.best_peer),
            us(r.seconds("copy")),
            ratio(r.over_f),
            ratio(r.over_peer),
            f"{r.over_floor:.3f}" if r.past_l2 else f"({r.over_floor:.3f})",
            f"{r.ours['gb_per_second']:.0f}",
        ]
        for r in results
    ]
    return markdown(header, lines)


def mean_line(title: str, results: list[Result]) -> list[str]:
    past = [r.over_floor for r in results if r.past_l2]
    return [
        title,
        str(len(results)),
        ratio(geometric_mean([r.over_f for r in results])),
        over_peer_text(results),
        f"{geometric_mean(past):.3f} ({len(past)})" if past else "",
    ]


def mean_table(results: list[Result]) -> str:
    header = [
        "geometric means",
        "cells",
        "over `F.layer_norm`",
        "over best peer (cells)",
        "time in copies past L2 (cells)",
    ]
    groups = [(title, of_group(results, group)) for group, title in GROUPS.items()]
    return markdown(header, [mean_line(*group) for group in [*groups, ("All cells, each once", results)] if group[1]])


def misses(results: list[Result]) -> str:
    """The cells that miss a target, worst first."""
    over = sorted((r for r in results if r.past_l2 and r.over_floor > COPY_LIMIT), key=lambda r: -r.over_floor)
    inside, outside = ([r for r in over if (r.ours["cols"] in COPY_COLS) == wanted] for wanted in (True, False))
    limit = f"more than {COPY_LIMIT - 1:.0%} over the copy"
    bounds = f"{COPY_COLS[0]} to {COPY_COLS[-1]} columns"
    past = sum(r.past_l2 for r in results)
    lines = [
        behind_peers(results),
        listing(f"Past L2 and {limit}, {bounds} (of {past} cells past L2)", list(map(copies_text, inside))),
        listing(f"Past L2 and {limit}, other columns", list(map(copies_text, outside))),
    ]
    return "\n".join(lines)


def copies_text(result: Result) -> str:
    return f"{result.label} ({result.over_floor:.3f})"


def odd_table(results: dict[CellKey, Result]) -> str:
    """Each odd row length beside its even neighbour, where both were measured with as many rows."""
    lines = []
    for (dtype, rows, cols), odd in results.items():
        even = results.get((dtype, rows, cols - 1))
        if cols % 2 and even:
            ours, theirs = ([us(r.seconds(name)) for r in (odd, even)] for name in (OURS, THEIRS))
            slower = f"{odd.seconds(OURS) / even.seconds(OURS):.3f}"
            lines.append([f"{dtype} {rows} x {cols} and {cols - 1}", *ours, slower, *theirs])
    header = ["rows x cols", "`fastln` odd", "even", "odd over even", "`F.layer_norm` odd", "even"]
    return markdown(header, lines) if lines else ""


def chain_table(rows: list[dict], results: dict[CellKey, Result]) -> str:
    """layer_norm and the matmul that reads its output, with either layer norm."""
    chains: dict[CellKey, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "chain":
            chains.setdefault((row["dtype"], row["rows"], row["cols"]), {})[row["name"]] = row["seconds"]
    lines = []
    for (dtype, n, k), seconds in chains.items():
        if {OURS, THEIRS} <= set(seconds):
            alone = results.get((dtype, n, k))
            saved = seconds[THEIRS] - seconds[OURS]
            expected = signed(alone.seconds(THEIRS) - alone.seconds(OURS)) if alone else ""
            text = f"{dtype} {shape_text((n, k))} → {shape_text((k, k))}"
            lines.append([text, us(seconds[THEIRS]), us(seconds[OURS]), signed(saved), expected])
    header = ["layer_norm → matmul", "with `F.layer_norm`", "with `fastln`", "saved", "saved by layer_norm alone"]
    return markdown(header, lines) if lines else ""


def signed(seconds: float) -> str:
    return f"{seconds * 1e6:+.2f}"


def host_table(results: list[Result]) -> str:
    """Host microseconds of one eager call, where they were measured."""
    columns = [(THEIRS, "host_seconds"), (OURS, "host_seconds")]
    columns += [(THEIRS, "host_seconds_inference_mode"), (OURS, "host_seconds_inference_mode")]
    columns += [("torch.compile", "host_seconds"), ("Liger", "host_seconds")]
    lines = []
    for r in results:
        times = [r.found.get(name, {}).get(key) for name, key in columns]
        if times[1] is not None:
            lines.append([r.label, *("" if t is None else us(t) for t in times)])
    header = ["host time of an eager call", "`F.layer_norm`, no_grad", "`fastln`, no_grad"]
    header += [
        "`F.layer_norm`, inference_mode",
        "`fastln`, inference_mode",
        "`torch.compile`, no_grad",
        "Liger, no_grad",
    ]
    return markdown(header, lines) if lines else ""


# --------------------------------------------------------------------------------------- documents


def sentence(machine: dict) -> str:
    return f"{caption(machine, COPY)}{peers_sentence(machine)} Weight and bias have the dtype of x."


def summary(rows: list[dict], by_key: dict[CellKey, Result]) -> list[str]:
    """Geometric means, misses, and what is no cell of its own."""
    results = list(by_key.values())
    parts = [mean_table(results), misses(results)] if results else []
    return [part for part in (*parts, odd_table(by_key), chain_table(rows, by_key), host_table(results)) if part]


def document(machine: dict, rows: list[dict]) -> str:
    by_key = collect(machine, rows)
    note = "Time in copies stands in parentheses where input and output fit L2 together."
    parts = [f"{sentence(machine)} {note}", *summary(rows, by_key)]
    for group, title in GROUPS.items():
        if chosen := of_group(list(by_key.values()), group):
            parts.append(f"### {title}\n\n{cell_table(chosen)}")
    return "\n\n".join(parts)


def summary_document(machine: dict, rows: list[dict]) -> str:
    return "\n\n".join(summary(rows, collect(machine, rows)))


def short_document(machine: dict, rows: list[dict]) -> str:
    """The float16 cells that have a target, and the geometric means over every cell that has one."""
    targets = of_group(list(collect(machine, rows).values()), "target")
    lines = [
        [
            shape_text((r.ours["rows"], r.ours["cols"])),
            f"**{us(r.seconds(OURS))}**",
            us(r.seconds(THEIRS)),
            f"{us(r.seconds(r.best_peer))} ({name_of(r.best_peer)})",
            us(r.seconds("copy")),
            ratio(r.over_f),
            ratio(r.over_peer),
        ]
        for r in targets
        if r.ours["dtype"] == "float16"
    ]
    header = ["float16, rows x cols", "`fastln`", "`F.layer_norm`", "best peer", "copy", "over `F.layer_norm`"]
    parts = [sentence(machine), markdown([*header, "over best peer"], lines)]
    if targets:
        parts.append(means_sentence(targets))
    return "\n\n".join(parts)
