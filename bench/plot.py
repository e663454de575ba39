"""A picture of the forward benchmark: GB/s against cols, with the copy as the line to reach.

python bench/plot.py bench/results/h200.json docs/forward.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import table

ROWS = 4096

#: Greys for what is compared with; the ops take the colours below in the order of the list of kernels.
REFERENCES = {
    "copy": {"color": "0.1", "linestyle": (0, (5, 2)), "label": "copy (floor)"},
    "F.layer_norm": {"color": "0.35", "marker": "s", "label": "F.layer_norm"},
    "naive": {"color": "0.65", "marker": "v", "label": "naive"},
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # distinct without colour vision
MARKERS = "oD^XPh"

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "svg.hashsalt": "fastln",  # the same figures give the same file
    "svg.fonttype": "none",
}


def draw(machine: dict, rows: list[dict], target: Path) -> None:
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(1, len(dtypes), figsize=(4.6 * len(dtypes), 4.2), sharey=True, squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        panel(axis, [r for r in rows if r["dtype"] == dtype and r["rows"] == ROWS and r["kind"] != "scalar"], dtype)
    axes[0][0].set_ylabel("GB/s, cold")
    gpu, torch = machine["gpu"]["name"], machine["torch"]
    figure.suptitle(f"Layer norm of {ROWS} rows on {gpu} (torch {torch}, fastln {machine['fastln']})", fontsize=10)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=160, metadata={"Date": None} if target.suffix == ".svg" else None)


def panel(axis, rows: list[dict], dtype: str) -> None:
    """One line for each name: its bytes over its time, against cols."""
    ops = 0
    for name in dict.fromkeys(row["name"] for row in rows):
        line = sorted((row["cols"], row["gb_per_second"]) for row in rows if row["name"] == name)
        style = REFERENCES.get(name)
        if style is None:
            style = {"color": COLOURS[ops % 6], "marker": MARKERS[ops % 6], "label": table.short(name), "zorder": 3}
            ops += 1
        axis.plot(*zip(*line, strict=True), markersize=4, linewidth=1.4, **style)
    cols = sorted({row["cols"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(cols, [str(c) for c in cols])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("columns")
    axis.set_title(dtype, fontsize=9)
    axis.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON that `pytest bench --benchmark-json=FILE` wrote")
    parser.add_argument("picture", type=Path, help="file to write, .svg or .png")
    options = parser.parse_args()
    draw(*table.load(options.results), options.picture)


if __name__ == "__main__":
    main()
