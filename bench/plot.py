"""A picture of the benchmark: GB/s against columns, with the copy as the line to reach; or of training: losses.

python bench/plot.py bench/results/h200-layer_norm.json docs/layer_norm.svg           fastln.layer_norm
python bench/plot.py bench/results/h200-backward.json docs/layer_norm_backward.svg    its backward
python bench/plot.py bench/results/h200-training.json docs/training.svg               losses of training runs
python bench/plot.py bench/results/h200-named.json build/named.svg                    the named ops

The results say which of these it is; --suite chooses where they hold several.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import figures
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import named_table

ROWS = 4096
DTYPES = ("float16", "bfloat16", "float32")  # the order of the panels

#: Greys and dashes for what is compared with; the ops take the colours below in the order of the list of kernels.
REFERENCES = {
    "copy": {"color": "0.1", "linestyle": (0, (5, 2)), "label": "copy"},
    "torch.add": {"color": "0.1", "linestyle": (0, (5, 2)), "label": "x+dy→dx"},
    "F.layer_norm": {"color": "0.35", "marker": "s", "label": "F.layer_norm"},
    "naive": {"color": "0.65", "marker": "v", "label": "naive"},
    "torch.compile": {"color": "0.5", "marker": "^", "label": "torch.compile"},
    "Liger": {"color": "0.65", "marker": "v", "label": "Liger"},
}
LABELS = {"fastln.layer_norm_bwd": "fastln"}
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


def named(rows: list[dict]) -> tuple[str, list[dict]]:
    """Title and rows of the picture of the named ops."""
    return f"Layer norm of {ROWS} rows", [r for r in rows if r["rows"] == ROWS and r["kind"] != "scalar"]


def layer_norm(rows: list[dict]) -> tuple[str, list[dict]]:
    """Title and rows of the picture of layer_norm: the sweep, whose inputs are all about as large."""
    return "fastln.layer_norm, inputs of 64 to 128 MiB", [r for r in rows if "sweep" in r["groups"]]


def backward(rows: list[dict]) -> tuple[str, list[dict]]:
    """Title and rows of the picture of the backward: its sweep."""
    return "Backward of fastln.layer_norm, inputs of 64 to 128 MiB", [r for r in rows if "sweep" in r["groups"]]


SUITES = {"named": named, "layer_norm": layer_norm, "backward": backward}


def draw(machine: dict, rows: list[dict], suite: str):
    """The figure of a suite: a panel for each dtype."""
    title, rows = SUITES[suite](rows)
    dtypes = dtypes_of(rows)
    figure, axes = plt.subplots(1, len(dtypes), figsize=(4.6 * len(dtypes), 4.2), sharey=True, squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        panel(axis, [r for r in rows if r["dtype"] == dtype], dtype)
    axes[0][0].set_ylabel("GB/s, cold")
    axes[0][0].set_ylim(0, 1.05 * max(row["gb_per_second"] for row in rows))  # of all panels
    finish(figure, title, machine)
    return figure


def finish(figure, title: str, machine: dict) -> None:
    name, torch = machine.get("gpu", {"name": "a CPU"})["name"], machine["torch"]
    figure.suptitle(f"{title} on {name} (torch {torch}, fastln {machine['fastln']})", fontsize=10)
    figure.tight_layout()


def dtypes_of(rows: list[dict]) -> list[str]:
    """Those that there are, in the order of the panels."""
    found = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    if not found:
        raise SystemExit("the results hold nothing to draw for this suite")
    return found


def panel(axis, rows: list[dict], dtype: str) -> None:
    """One line for each name that was measured nearly everywhere: its bytes over its time, against cols."""
    ops = 0
    all_cols = sorted({row["cols"] for row in rows})
    for name in dict.fromkeys(row["name"] for row in rows):
        line = sorted((row["cols"], row["gb_per_second"]) for row in rows if row["name"] == name)
        if len(line) < 0.8 * len(all_cols):
            continue
        style = REFERENCES.get(name)
        if style is None:
            style = {
                "color": COLOURS[ops % 6],
                "marker": MARKERS[ops % 6],
                "label": LABELS.get(name, named_table.short(name)),
                "zorder": 3,
            }
            ops += 1
        axis.plot(*zip(*line, strict=True), markersize=4, linewidth=1.4, **style)
    axis.set_xscale("log", base=2)
    ticks = ticks_for(all_cols)
    axis.set_xticks(ticks, [cols_text(cols) for cols in ticks])
    axis.minorticks_off()
    axis.set_xlabel("columns")
    axis.set_title(dtype, fontsize=9)
    axis.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def ticks_for(cols: list[int]) -> list[int]:
    """All of a few; else every other power of two among them."""
    return cols if len(cols) <= 8 else [c for c in cols if c & (c - 1) == 0][::2]


def cols_text(cols: int) -> str:
    return str(cols) if cols < 10000 else f"{cols // 1024}k"


def draw_training(machine: dict, rows: list[dict]):
    """The figure of the training runs: losses, and below them how far each run is from the first."""
    dtypes = dtypes_of(rows)
    figure, axes = plt.subplots(2, len(dtypes), figsize=(4.6 * len(dtypes), 5.4), sharex=True, squeeze=False)
    for (above, below), dtype in zip(axes.T, dtypes, strict=True):
        reference, *others = (row for row in rows if row["dtype"] == dtype)
        steps = range(1, len(reference["losses"]) + 1)
        above.plot(steps, reference["losses"], color="0.75", linewidth=4, label=reference["name"])
        for i, row in enumerate(others):
            style = {"color": COLOURS[i], "linewidth": 1.2, "linestyle": ("-", "--")[i % 2], "label": row["name"]}
            above.plot(steps, row["losses"], **style)
            differences = [abs(a - b) for a, b in zip(row["losses"], reference["losses"], strict=True)]
            below.plot(steps, differences, **style)
        below.set_yscale("symlog", linthresh=1e-7)
        below.set_ylim(bottom=0)
        below.set_xlabel("step")
        above.set_title(dtype, fontsize=9)
        above.legend(fontsize=8, frameon=False)
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel(f"|loss - loss with {reference['name']}|")
    finish(figure, "Training a small transformer", machine)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON that the benchmark or train_curve.py wrote")
    parser.add_argument("picture", type=Path, help="file to write, .svg or .png")
    parser.add_argument("--suite", choices=(*SUITES, "training"), help="default: what the results begin with")
    options = parser.parse_args()
    machine, rows = figures.load(options.results)
    if not rows:
        parser.error(f"{options.results} holds no measurements")
    suite = options.suite or rows[0]["suite"]
    rows = [row for row in rows if row["suite"] == suite]
    plt.rcParams.update(STYLE)
    figure = draw_training(machine, rows) if suite == "training" else draw(machine, rows, suite)
    target = options.picture
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=160, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
