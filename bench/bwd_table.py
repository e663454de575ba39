"""The tables of the backward: every shape, geometric means, what is slower than it should be, and a step's cost."""

from __future__ import annotations

from collections.abc import Callable

from cell_results import (
    MEAN_HEADER,
    PEERS,
    THEIRS,
    Cause,
    CellKey,
    Result,
    by_dtype,
    cause_table,
    collect,
    item_bytes,
    mean_cells,
    means_sentence,
    name_of,
    of_group,
    peers_ahead,
    ratio,
    ratio_cells,
    ratio_list,
    row_bytes,
    short_table,
    span,
    time_cells,
    with_dtypes,
)
from figures import geometric_mean, joined, machine_text, markdown, shape_text, us

#: Titles of the groups of shapes in norm_cells.py, and what the tables of all shapes call them.
GROUPS = {
    "target": ("Main shapes", "main"),
    "dx": ("dx alone, the main shapes", "dx alone"),
    "sweep": ("Sweep: 64 to 128 MiB of input, 64 to 262144 columns", "sweep"),
    "batch": ("Batches: 64 to 2048 rows", "batch"),
    "rows": ("From one row to a million", "rows"),
}

#: Of the README. Those in which a peer is ahead are added.
SHORT: list[CellKey] = [
    ("float16", 4096, 1024),
    ("float16", 4096, 4096),
    ("float16", 8192, 8192),
    ("float16", 32768, 768),
    ("float16", 1, 8192),
    ("bfloat16", 4096, 512),
    ("float32", 4096, 1024),
    ("float32", 32768, 768),
]

FLOOR = "`x+dy→dx` is `torch.add` of x and dy into dx, which reads and writes the least that any backward must."
TARGET = "The target is 1.15 times that, plus 2 µs."

#: Of shapes that miss the target.
CAUSES = (
    Cause(
        "no multiple of 16 bytes",
        lambda r: row_bytes(r) % 16 != 0,
        "instructions: some 370 for a row and warp in bundles (131072x257 takes 56 µs without the arithmetic), 400 "
        "otherwise",
    ),
    Cause(
        "more than 256 KB (512 KB of float32)",
        lambda r: row_bytes(r) > (512 if item_bytes(r) == 4 else 256) << 10,
        "the sums come first, and x and dy are read twice",
    ),
    Cause(
        "more than 32 KB",
        lambda r: row_bytes(r) > 32 << 10,
        "a row's two sums travel round its cluster",
    ),
    Cause(
        "up to 2048 rows of 8 MB at most",
        lambda r: r.ours["rows"] <= 2048 and r.ours["rows"] * row_bytes(r) <= 8 << 20,
        "one launch, which reads x and dy twice, the second time from L2",
    ),
    Cause(
        "32 KB",
        lambda r: row_bytes(r) == 32 << 10,
        "8.7 MB of partial sums, written and read",
    ),
    Cause(
        "the others",
        lambda r: True,
        "the second kernel takes 2 µs with few columns and 5 with many, filling and draining the ring 1 to 1.5 µs",
    ),
)


def both(machine: dict, rows: list[dict]) -> tuple[list[Result], list[Result]]:
    """The results of the whole backward, and of dx alone."""
    whole, alone = (collect(machine, (row for row in rows if row["dx_alone"] is wanted)) for wanted in (False, True))
    return list(whole.values()), list(alone.values())


# --------------------------------------------------------------------------------------------- parts


def cell_table(title: str, results: list[Result], with_groups: bool = True) -> str:
    """Some shapes of one dtype; a peer that ran in none of them has no column."""
    peers = [name for name in PEERS if any(name in r.found for r in results)]
    header = [f"{title}, rows x cols", *(["group"] if with_groups else []), "`fastln`", f"`{THEIRS}`"]
    header += [*map(name_of, peers), "`x+dy→dx`", f"over `{THEIRS}`", *(["over best peer"] if peers else [])]
    header += ["time / `x+dy→dx`", "target", "met", "GB/s"]
    lines = []
    for r in results:
        groups = [", ".join(GROUPS[group][1] for group in r.ours["groups"])] if with_groups else []
        shape = shape_text((r.ours["rows"], r.ours["cols"]))
        ratios = ratio_cells(r) if peers else [ratio(r.over_f)]
        target = [us(r.ours["target_seconds"]), "yes" if r.ours["target_met"] else "**no**"]
        cells = [*time_cells(r, peers), *ratios, f"{r.over_floor:.3f}", *target, f"{r.ours['gb_per_second']:.0f}"]
        lines.append([shape, *groups, *cells])
    return markdown(header, lines)


def mean_line(title: str, results: list[Result]) -> list[str]:
    met = sum(r.ours["target_met"] for r in results)
    over_floor = f"{geometric_mean([r.over_floor for r in results]):.3f}"
    return [title, *mean_cells(results), over_floor, f"{met} of {len(results)}"]


def mean_table(whole: list[Result], alone: list[Result]) -> str:
    groups = []
    for group, (title, _) in GROUPS.items():
        chosen = of_group([*whole, *alone], group)
        groups += with_dtypes(title, chosen) if group == "target" else [(title, chosen)]
    groups.append(("All shapes but dx alone, each once", whole))
    header = [*MEAN_HEADER, "time / `x+dy→dx`", "targets met"]
    return markdown(header, [mean_line(*group) for group in groups if group[1]])


def bound(targets: list[Result]) -> str:
    """What the mean over ``F.layer_norm`` would be at the targets."""
    if not targets:
        return ""
    most = geometric_mean([r.seconds(THEIRS) / r.ours["target_seconds"] for r in targets])
    return f"If each main shape just met its target, the mean over `{THEIRS}` would be {ratio(most)}."


def over_target(result: Result) -> float:
    return result.ours["seconds"] / result.ours["target_seconds"]


def missed(results: list[Result]) -> list[Result]:
    return [r for r in results if not r.ours["target_met"]]


def dx_losses(alone: list[Result]) -> str:
    """Of dx alone: where ``F.layer_norm``'s backward is ahead, and the targets missed."""
    behind = sorted((r for r in alone if r.over_f < 1), key=lambda r: r.over_f)
    lines = [[r.label, f"`{THEIRS}` is ahead", f"{r.over_f:.3f}x"] for r in behind]
    lines += [[r.label, "time / target", f"{over_target(r):.3f}"] for r in missed(alone)]
    return markdown([f"dx alone (of {len(alone)} shapes)", "", "ratio"], lines) if lines else ""


def steps_of(rows: list[dict], kind: str, figure: Callable[[dict], float]) -> dict[str, tuple[float, float]]:
    """The figure of a step with ``F.layer_norm`` and with ours by shape, from the rows of one kind."""
    steps: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == kind:
            label = f"{row['dtype']} {shape_text((row['rows'], row['cols']))}"
            steps.setdefault(label, {})["theirs" if row["name"] == THEIRS else "ours"] = figure(row)
    return {label: (found["theirs"], found["ours"]) for label, found in steps.items() if len(found) == 2}


def step_table(title: str, steps: dict[str, tuple[float, float]], text: Callable[[float], str]) -> str:
    lines = [[label, text(theirs), text(ours), f"{ours / theirs:.3f}"] for label, (theirs, ours) in steps.items()]
    return markdown([title, f"`{THEIRS}`", "`fastln`", "ours / theirs"], lines) if lines else ""


def host_sentence(steps: dict[str, tuple[float, float]]) -> str:
    if not steps:
        return ""
    shapes = ", ".join(steps)
    times = span([ours / theirs for theirs, ours in steps.values()])
    return (
        f"Forward and `backward()` of one small layer norm ({shapes}) cost the host {times} times what "
        f"`{THEIRS}` costs it."
    )


# ----------------------------------------------------------------------------------------- sections


def sections(machine: dict, rows: list[dict]) -> dict[str, str]:
    """Each section that these rows have figures for, by name."""
    whole, alone = both(machine, rows)
    host = steps_of(rows, "host", lambda row: row["seconds"])
    memory = steps_of(rows, "memory", lambda row: row["peak_bytes"])
    found = {
        "backward_host": step_table("host µs of forward and `backward()`", host, us),
        "backward_host_short": host_sentence(host),
        "backward_memory": step_table("peak bytes of forward and `backward()`", memory, "{:,}".format),
    }
    if whole or alone:
        targets = of_group(whole, "target")
        if targets:
            parts = [
                f"dx, dweight and dbias. {machine_text(machine)} {FLOOR}",
                short_table(targets, SHORT, "`x+dy→dx`"),
            ]
            found["backward_short"] = joined(*parts, means_sentence(targets))
        found["backward_means"] = joined(machine_text(machine), mean_table(whole, alone), bound(targets))
        title = "time / target, where missed"
        causes = cause_table(missed(whole), CAUSES, title, over_target)
        found["backward_losses"] = joined(peers_ahead(whole), causes, dx_losses(alone))
        count = f"{len(missed(whole))} of {len(whole)} shapes miss the target:" if whole else ""
        found["backward"] = joined(
            f"{machine_text(machine)} {FLOOR} {TARGET}",
            *(cell_table(dtype, chosen) for dtype, chosen in by_dtype(whole).items()),
            *(cell_table(f"dx alone, {dtype}", chosen, False) for dtype, chosen in by_dtype(alone).items()),
            count,
            ratio_list("time / target", missed(whole), over_target),
        )
    return {name: text for name, text in found.items() if text}
