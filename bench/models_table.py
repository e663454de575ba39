"""Markdown tables from the JSON of bench/models.py."""

from __future__ import annotations

import figures

NOISE = (
    "In brackets: median over rounds of stock's time over this one's, taken round by round, so it need not be the "
    "quotient of the two medians"
)

#: What tells the rows of one variant apart.
KEYS = ("model", "dtype", "direction")


def sections(results: dict) -> dict[str, str]:
    """Each section that the results have figures for, by name."""
    eager, compiled = ([row for row in results["models"] if is_eager(row) is wanted] for wanted in (True, False))
    found = {}
    if eager:
        found["models"] = document(results, eager, f"{NOISE}; differences below 5 % are noise.")
        found["models_short"] = short_sentence(results, eager)
    if compiled:
        note = (
            f"{NOISE}. `convert` calls our ops in the graph; `convert, inductor` leaves the layer norm to Inductor, as "
            "stock does: how far those two differ is the noise."
        )
        found["models_compiled"] = document(results, compiled, note)
    # Host times beside compiled models alone are not those of the documents.
    if results["host"] and (eager or not compiled):
        found["host"] = host_document(results)
    return found


def is_eager(row: dict) -> bool:
    return row["engine"] == "eager"


def document(results: dict, rows: list[dict], note: str) -> str:
    """Step times of whole models, a table for each engine."""
    engines = dict.fromkeys(row["engine"] for row in rows)
    tables = [engine_table(results, engine, [row for row in rows if row["engine"] == engine]) for engine in engines]
    missing = f"Not installed, so not measured: {', '.join(results['missing'])}." if results["missing"] else ""
    return figures.joined(f"{caption(results, rows)} {note}", *tables, missing)


def values(results: dict, rows: list[dict], key: str) -> list[int]:
    """What the rows, or the results as a whole, say of ``key``."""
    return sorted({row.get(key, results[key]) for row in rows})


def range_text(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def caption(results: dict, rows: list[dict]) -> str:
    machine = results["machine"]
    gpu = machine.get("gpu", {"name": machine["processor"], "driver": "none"})
    rounds, layers, widths = (range_text(values(results, rows, key)) for key in ("rounds", "layers", "width"))
    return (
        f"{gpu['name']} (driver {gpu['driver']}), torch {machine['torch']}, {figures.fastln_text(machine)}, "
        f"{machine['date']}. Milliseconds a step, median of {rounds} rounds of {results['steps']} steps in which the "
        f"variants take turns; {layers} blocks of width {widths}; a training step is "
        "forward, loss, backward and fused AdamW."
    )


def engine_table(results: dict, engine: str, rows: list[dict]) -> str:
    """A line for each model, width and dtype; a column for each variant, of inference and of training."""
    columns = list(dict.fromkeys((row["direction"], row["variant"]) for row in rows))
    columns.sort(key=lambda column: column[0])  # inference, training; the variants in the order of the results
    has_widths = len(values(results, rows, "width")) > 1
    cases: dict[tuple[str, ...], dict[tuple[str, str], dict]] = {}
    for row in rows:
        width = (f"width {row.get('width', results['width'])}",) if has_widths else ()
        cases.setdefault((row["model"], *width, row["dtype"]), {})[row["direction"], row["variant"]] = row
    lines = []
    for case, found in cases.items():
        norms = next(iter(found.values()))["norms"]
        lines.append([", ".join(case), str(norms), *(cell(found.get(column)) for column in columns)])
    means = ["" if name == "stock" else f"{mean_of(rows, direction, name):.3f}x" for direction, name in columns]
    first = dict.fromkeys(column[0] for column in columns)
    titles = []
    for direction, name in columns:
        titles.append(f"{direction}: {name}" if direction in first else name)
        first.pop(direction, None)
    header = [f"{engine}: model, {'width, ' if has_widths else ''}dtype", "norms", *titles]
    return figures.markdown(header, [*lines, ["geometric mean", "", *means]])


def mean_of(rows: list[dict], direction: str, variant: str) -> float:
    wanted = direction, variant
    return figures.geometric_mean([row["over_stock"] for row in rows if (row["direction"], row["variant"]) == wanted])


def cell(row: dict | None) -> str:
    if row is None:
        return ""
    milliseconds = f"{row['seconds'] * 1e3:.2f}"
    return milliseconds if row["variant"] == "stock" else f"{milliseconds} ({row['over_stock']:.3f}x)"


def short_sentence(results: dict, rows: list[dict]) -> str:
    """What conversion and override make of a step of these models, in words."""
    models, dtypes, directions = (list(dict.fromkeys(row[key] for row in rows)) for key in KEYS)
    layers, widths = (range_text(values(results, rows, key)) for key in ("layers", "width"))
    told = []
    for variant in dict.fromkeys(row["variant"] for row in rows if row["variant"] != "stock"):
        ratios = [row["over_stock"] for row in rows if row["variant"] == variant]
        span = f"{min(ratios):.3f}x to {max(ratios):.3f}x"
        told.append(f"`fastln.{variant}` {figures.geometric_mean(ratios):.3f}x as fast as stock ({span})")
    return (
        f"Eager, a step of {' or '.join(directions)} of {len(models)} transformers ({layers} blocks of width {widths}, "
        f"{' and '.join(dtypes)}), geometric mean: {', '.join(told)}. Differences below 5 % are noise."
    )


def host_document(results: dict) -> str:
    """Host time of one call; F.layer_norm and nn.LayerNorm each before what takes its place."""
    seconds = {(row["name"], row["grad"]): row["seconds"] for row in results["host"]}
    lines = []
    for name in dict.fromkeys(name for name, _ in seconds):
        base = "nn.LayerNorm" if "LayerNorm" in name else "F.layer_norm"
        cells = []
        for grad in (False, True):
            ratio = "" if name == base else f" ({seconds[name, grad] / seconds[base, grad]:.2f})"
            cells.append(f"{figures.us(seconds[name, grad])}{ratio}")
        lines.append([name, *cells])
    machine = results["machine"]
    note = (
        f"Host microseconds a call, float16 16x1024, torch {machine['torch']}, Python {machine['python']}. "
        "In brackets: over torch's."
    )
    return figures.joined(note, figures.markdown(["call", "forward, no grad", "forward and backward"], lines))
