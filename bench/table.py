"""Markdown from the JSON of the benchmark: named ops, ``fastln.layer_norm``, its backward, training, whole models.

python bench/table.py build/layer_norm.json                                                   print it all
python bench/table.py bench/results/h200-layer_norm.json --into README.md docs/*.md           put it into files

A section NAME goes between the lines ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->`` of whichever file has them.

===================  ==================================================================================================
bench/results/h200-  sections
===================  ==================================================================================================
layer_norm.json      layer_norm (every shape), layer_norm_short (of the README), layer_norm_means, layer_norm_losses,
                     layer_norm_odd, layer_norm_chain, layer_norm_host
backward.json        backward (every shape), backward_short, backward_means, backward_losses, backward_host,
                     backward_host_short, backward_memory
named.json           named, named_short
models.json          models, models_short, host
models-compiled.json models_compiled
training.json        training
===================  ==================================================================================================
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

#: Of each suite of the benchmark, what makes its sections.
SUITES = {
    "named": named_table.sections,
    "layer_norm": norm_table.sections,
    "backward": bwd_table.sections,
    "training": training_table.sections,
}


def sections(path: Path) -> dict[str, str]:
    """The text of each section that the results have figures for."""
    document = json.loads(path.read_text())
    if document.get("suite") == "models":
        return models_table.sections(document)
    machine, rows = figures.load(path)
    found = {}
    for suite, make in SUITES.items():
        if chosen := [row for row in rows if row["suite"] == suite]:
            found |= make(machine, chosen)
    return found


def insert(found: dict[str, str], target: Path) -> list[str]:
    """Replace what stands between the markers of each section that ``target`` has; returns the names of those."""
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
    target.write_text(text)
    return filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON that the benchmark, models.py or train_curve.py wrote")
    parser.add_argument("--into", type=Path, nargs="+", metavar="FILE", help="Markdown files to update, not print")
    options = parser.parse_args()
    for path in (options.results, *(options.into or [])):
        if not path.is_file():
            parser.error(f"no such file: {path}")
    found = sections(options.results)
    if not found:
        parser.error(f"{options.results} holds no measurements")
    if not options.into:
        print(*found.values(), sep="\n\n")
        return
    filled = [name for target in options.into for name in insert(found, target)]
    if not filled:
        markers = ", ".join(f"<!-- {name}:begin -->" for name in found)
        sys.exit(f"{', '.join(map(str, options.into))}: none of the lines that these results fill: {markers}")


if __name__ == "__main__":
    main()
