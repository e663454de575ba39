"""Markdown tables from the JSON of bench/models.py."""

from __future__ import annotations

import figures


def document(results: dict) -> str:
    """Step times of whole models."""
    parts = [caption(results)]
    for engine in dict.fromkeys(row["engine"] for row in results["models"]):
        parts.append(engine_table(engine, [row for row in results["models"] if row["engine"] == engine]))
    if results["missing"]:
        parts.append(f"Not installed, so not measured: {', '.join(results['missing'])}.")
    return "\n\n".join(parts)


def caption(results: dict) -> str:
    machine = results["machine"]
    gpu = machine.get("gpu", {"name": machine["processor"], "driver": "none"})
    rounds = sorted({row.get("rounds", results["rounds"]) for row in results["models"]} or {results["rounds"]})
    span = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    return (
        f"{gpu['name']} (driver {gpu['driver']}), torch {machine['torch']}, fastln {machine['fastln']}, "
        f"{machine['date']}. Milliseconds a step, median of {span} rounds of {results['steps']} steps in which the "
        f"variants take turns; {results['layers']} blocks of width {results['width']}; a training step is "
        "forward, loss, backward and fused AdamW. In brackets: times as fast as stock."
    )


def engine_table(engine: str, rows: list[dict]) -> str:
    """A line for each model, dtype and direction; a column for each variant."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    cases = dict.fromkeys((row["model"], row["dtype"], row["direction"]) for row in rows)
    lines = []
    for case in cases:
        found = {row["variant"]: row for row in rows if (row["model"], row["dtype"], row["direction"]) == case}
        norms = next(iter(found.values()))["norms"]
        lines.append([", ".join(case), str(norms), *(cell(found[name]) for name in variants)])
    header = [f"{engine}: model, dtype, direction", "norms", *variants]
    ratios = [
        figures.geometric_mean([row["over_stock"] for row in rows if row["variant"] == name]) for name in variants
    ]
    mean = [
        "geometric mean",
        "",
        *("" if name == "stock" else f"{r:.3f}x" for name, r in zip(variants, ratios, strict=True)),
    ]
    return figures.markdown(header, [*lines, mean])


def cell(row: dict) -> str:
    milliseconds = f"{row['seconds'] * 1e3:.2f}"
    return milliseconds if row["variant"] == "stock" else f"{milliseconds} ({row['over_stock']:.3f}x)"


def host_document(results: dict) -> str:
    """Host time of one call; F.layer_norm and nn.LayerNorm each before what takes its place."""
    lines = []
    for row in results["host"]:
        base = "nn.LayerNorm" if "LayerNorm" in row["name"] else "F.layer_norm"
        stock = next(r for r in results["host"] if r["name"] == base and r["grad"] == row["grad"])
        what = "forward and backward" if row["grad"] else "forward, no grad"
        ratio = "" if row is stock else f"{row['seconds'] / stock['seconds']:.2f}"
        lines.append([f"{row['name']}, {what}", figures.us(row["seconds"]), ratio])
    machine = results["machine"]
    note = f"Host microseconds a call, float16 16x1024, torch {machine['torch']}, Python {machine['python']}."
    return f"{note}\n\n" + figures.markdown(["call", "µs", "over torch's"], lines)
