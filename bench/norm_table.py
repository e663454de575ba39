"""The tables of ``fastln.layer_norm``: every shape, geometric means, and what is slower than it should be."""

from __future__ import annotations

from cell_results import (
    MEAN_HEADER,
    OURS,
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
    time_cells,
    with_dtypes,
)
from figures import METHOD, geometric_mean, joined, machine_text, markdown, shape_text, us

#: Titles of the groups of shapes in norm_cells.py, and what the tables of all shapes call them.
GROUPS = {
    "target": ("Main shapes", "main"),
    "dtypes": ("The same shapes in the other dtypes", "other dtype"),
    "sweep": ("Sweep: 64 to 128 MiB of input, 100 to 262144 columns", "sweep"),
    "few rows": ("Few rows (1 to 64 of 4096 columns)", "few rows"),
    "odd": ("Odd numbers of columns", "odd"),
}

#: Of the README. Those in which a peer is ahead are added.
SHORT: list[CellKey] = [
    ("float16", 4096, 1024),
    ("float16", 4096, 4096),
    ("float16", 8192, 8192),
    ("float16", 16, 4096),
    ("float16", 512, 65536),
    ("bfloat16", 4096, 512),
    ("bfloat16", 4096, 1024),
    ("float32", 4096, 1024),
    ("float32", 32768, 768),
]

COPY = "`copy` reads x and writes it once, the least any kernel must move."

#: Past L2, a shape should take at most this many times the copy.
COPY_LIMIT = 1.03


def no_vectors(r: Result) -> bool:
    return row_bytes(r) % 16 != 0


def is_power_of_two(r: Result) -> bool:
    return r.ours["cols"] & (r.ours["cols"] - 1) == 0


#: Of shapes past L2 that take more than COPY_LIMIT times the copy.
CAUSES = (
    Cause("more than 1 MB", lambda r: row_bytes(r) > 1 << 20, "three launches, and x is read twice"),
    Cause(
        "more than 512 KB",
        lambda r: row_bytes(r) > 512 << 10,
        "clusters of 16 blocks fit seven times, on 112 of 132 multiprocessors, and are at one row at a time",
    ),
    Cause(
        "more than 64 KB",
        lambda r: row_bytes(r) > 64 << 10,
        "a row is in use until its last column is summed; 12 of 132 multiprocessors have no cluster",
    ),
    Cause(
        "no multiple of 16 bytes, 16-bit",
        lambda r: no_vectors(r) and item_bytes(r) == 2,
        "bulk copies to shared memory and back take 1.02 to 1.06 by themselves, and do not hide all arithmetic",
    ),
    Cause("no multiple of 16 bytes, float32", no_vectors, "accesses of 4 bytes; nearly as fast as whole rows"),
    Cause(
        "32 to 64 KB",
        lambda r: row_bytes(r) >= 32 << 10,
        "one to three blocks a multiprocessor",
    ),
    Cause(
        "more than 4096 columns, up to 4096 rows",
        lambda r: r.ours["cols"] > 4096 and r.ours["rows"] <= 4096,
        "two waves of blocks, of which the second is not full; a copy has no reductions to wait for",
    ),
    Cause(
        "other columns than powers of two (640, 1152, 1280, 1600, 2560…)",
        lambda r: not is_power_of_two(r),
        "most need bounds checks, and a quarter or less of their loads is idle",
    ),
    Cause("the others", lambda r: True, "`copy` is the driver's, which is faster than a plain copy kernel"),
)


# ------------------------------------------------------------------------------------------- parts


def cell_table(dtype: str, results: list[Result]) -> str:
    """Every shape of a dtype."""
    lines = [
        [
            shape_text((r.ours["rows"], r.ours["cols"])),
            ", ".join(GROUPS[group][1] for group in r.ours["groups"]),
            *time_cells(r, PEERS),
            *ratio_cells(r),
            f"{r.over_floor:.3f}" if r.past_l2 else f"({r.over_floor:.3f})",
            f"{r.ours['gb_per_second']:.0f}",
        ]
        for r in results
    ]
    header = [f"{dtype}, rows x cols", "group", "`fastln`", f"`{THEIRS}`", *map(name_of, PEERS), "copy"]
    return markdown([*header, f"over `{THEIRS}`", "over best peer", "time / copy", "GB/s"], lines)


def mean_line(title: str, results: list[Result]) -> list[str]:
    past = [r.over_floor for r in results if r.past_l2]
    return [title, *mean_cells(results), f"{geometric_mean(past):.3f} ({len(past)})" if past else ""]


def mean_table(results: list[Result]) -> str:
    groups = []
    for group, (title, _) in GROUPS.items():
        chosen = of_group(results, group)
        groups += with_dtypes(title, chosen) if group == "target" else [(title, chosen)]
    groups.append(("All shapes, each once", results))
    header = [*MEAN_HEADER, "time / copy past L2 (shapes)"]
    return markdown(header, [mean_line(*group) for group in groups if group[1]])


def bound(targets: list[Result]) -> str:
    """What the mean over ``F.layer_norm`` would be at the speed of the copy."""
    if not targets:
        return ""
    most = geometric_mean([r.seconds(THEIRS) / r.floor["seconds"] for r in targets])
    return f"If each main shape took as long as its copy, the mean over `{THEIRS}` would be {ratio(most)}."


def above_copy(results: list[Result]) -> list[Result]:
    return [r for r in results if r.past_l2 and r.over_floor > COPY_LIMIT]


def over_floor(result: Result) -> float:
    return result.over_floor


def odd_table(results: dict[CellKey, Result]) -> str:
    """Each odd row length beside its even neighbour, where both were measured with as many rows."""
    lines = []
    for (dtype, rows, cols), odd in results.items():
        even = results.get((dtype, rows, cols - 1))
        if cols % 2 and even:
            ours, theirs = ([us(r.seconds(name)) for r in (odd, even)] for name in (OURS, THEIRS))
            slower = f"{odd.seconds(OURS) / even.seconds(OURS):.3f}"
            lines.append([f"{dtype} {rows} x {cols} and {cols - 1}", *ours, slower, *theirs])
    header = ["rows x cols", "`fastln` odd", "even", "odd / even", f"`{THEIRS}` odd", "even"]
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
    header = ["layer_norm → matmul", f"with `{THEIRS}`", "with `fastln`", "saved", "saved by layer_norm alone"]
    return markdown(header, lines) if lines else ""


def signed(seconds: float) -> str:
    return f"{seconds * 1e6:+.2f}"


def host_table(results: list[Result]) -> str:
    """Host microseconds of one eager call, where they were measured."""
    columns = [(THEIRS, "host_seconds"), (OURS, "host_seconds")]
    columns += [(THEIRS, "host_seconds_inference_mode"), (OURS, "host_seconds_inference_mode")]
    columns += [(name, "host_seconds") for name in PEERS]
    lines = []
    for r in results:
        times = [r.found.get(name, {}).get(key) for name, key in columns]
        if times[1] is not None:
            lines.append([r.label, *("" if t is None else us(t) for t in times)])
    header = ["host µs of an eager call", f"`{THEIRS}`, no_grad", "`fastln`, no_grad"]
    header += [f"`{THEIRS}`, inference_mode", "`fastln`, inference_mode"]
    header += [f"{name_of(name)}, no_grad" for name in PEERS]
    return markdown(header, lines) if lines else ""


# ---------------------------------------------------------------------------------------- sections


def sections(machine: dict, rows: list[dict]) -> dict[str, str]:
    """Each section that these rows have figures for, by name."""
    by_key = collect(machine, rows)
    results = list(by_key.values())
    found = {
        "layer_norm_odd": odd_table(by_key),
        "layer_norm_chain": chain_table(rows, by_key),
        "layer_norm_host": host_table(results),
    }
    if results:
        targets, above = of_group(results, "target"), above_copy(results)
        if targets:
            parts = [f"{machine_text(machine)} {METHOD} {COPY}", short_table(targets, SHORT, "copy")]
            found["layer_norm_short"] = joined(*parts, means_sentence(targets))
        found["layer_norm_means"] = joined(machine_text(machine), mean_table(results), bound(targets))
        limit = f"time / copy, where more than {COPY_LIMIT}"
        found["layer_norm_losses"] = joined(peers_ahead(results), cause_table(above, CAUSES, limit, over_floor))
        found["layer_norm"] = joined(
            f"{machine_text(machine)} {COPY} `time / copy` stands in parentheses where input and output fit L2 "
            "together.",
            *(cell_table(dtype, chosen) for dtype, chosen in by_dtype(results).items()),
            f"Of {sum(r.past_l2 for r in results)} shapes past L2, {len(above)} take more than {COPY_LIMIT} times the "
            "copy:",
            ratio_list("time / copy", above, over_floor),
        )
    return {name: text for name, text in found.items() if text}
