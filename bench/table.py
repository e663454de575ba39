"""Markdown tables from the JSON of the benchmark: named ops, ``fastln.layer_norm``, its backward, training.

python bench/table.py build/bench.json                                     print them
python bench/table.py bench/results/layer_norm.json --into README.md       put them into a file

A section NAME goes between the lines ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``. The named ops make
the section ``bench``; layer_norm makes ``layer_norm`` (summary and every cell), ``layer_norm_short`` (the
float16 cells that have a target) and ``layer_norm_summary`` (the summary alone); the backward likewise makes
``backward``, ``backward_short`` (the cells that have a target) and ``backward_summary``; the training runs make
``training``; bench/models.py makes ``models`` and ``host``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import bwd_table
import figures
import models_table
import named_table
import norm_table
import training_table


def sections(path: Path) -> dict[str, str]:
    """The text of each section that the results have figures for."""
    document = json.loads(path.read_text())
    if document.get("suite") == "models":
        found = {"models": models_table.document(document)} if document["models"] else {}
        return found | ({"host": models_table.host_document(document)} if document["host"] else {})
    machine, rows = figures.load(path)
    named, norm, backward, training = (
        [row for row in rows if row["suite"] == suite] for suite in ("named", "layer_norm", "backward", "training")
    )
    found = {}
    if named:
        found["bench"] = f"{figures.caption(machine, figures.COPY)}\n\n{named_table.document(named)}"
    if norm:
        found["layer_norm"] = norm_table.document(machine, norm)
        found["layer_norm_short"] = norm_table.short_document(machine, norm)
        found["layer_norm_summary"] = norm_table.summary_document(machine, norm)
    if backward:
        found["backward"] = bwd_table.document(machine, backward)
        found["backward_short"] = bwd_table.short_document(machine, backward)
        found["backward_summary"] = bwd_table.summary_document(machine, backward)
    if training:
        found["training"] = training_table.document(machine, training)
    return found


def insert(found: dict[str, str], target: Path) -> None:
    """Replace what stands between the markers of each section that ``target`` has."""
    text = target.read_text()
    filled = []
    for name, content in found.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, has_begin, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if has_begin and has_end:
            text = f"{before}{begin}\n{content}\n{end}{after}"
            filled.append(name)
        elif begin in text or end in text:
            sys.exit(f"{target} lacks one of the lines {begin} and {end}, or has them in the wrong order")
    if not filled:
        markers = ", ".join(f"<!-- {name}:begin -->" for name in found)
        sys.exit(f"{target} has none of the lines that these results fill: {markers}")
    target.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON that the benchmark or train_curve.py wrote")
    parser.add_argument("--into", type=Path, metavar="FILE", help="Markdown file to update, not print")
    options = parser.parse_args()
    for path in filter(None, (options.results, options.into)):
        if not path.is_file():
            parser.error(f"no such file: {path}")
    found = sections(options.results)
    if not found:
        parser.error(f"{options.results} holds no measurements")
    if options.into:
        insert(found, options.into)
    else:
        print(*found.values(), sep="\n\n")


if __name__ == "__main__":
    main()
