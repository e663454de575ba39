"""The table of the training runs: final losses, their differences, step times, peak memory."""

from __future__ import annotations

from figures import joined, markdown

TEXT = (
    "A transformer of {layers} layers, width {width}, trained for {steps} steps of {batch} windows of {context} bytes "
    "of the standard library's source; seed, weights and batches are the same in each run. `float64` is a layer norm "
    "computed in float64 and rounded: what it is off by is what roundoff by itself comes to. Weights are kept in "
    "float32 and used in the dtype named."
)


def sections(machine: dict, rows: list[dict]) -> dict[str, str]:
    """The section, by name."""
    return {"training": document(machine, rows)}


def document(machine: dict, rows: list[dict]) -> str:
    header = ["layer norm", "first loss", "last loss", "largest difference from `nn.LayerNorm`"]
    header += ["median step, ms", "peak memory, MiB"]
    lines = [
        [
            f"{row['dtype']} `{row['name']}`",
            f"{row['losses'][0]:.4f}",
            f"{row['losses'][-1]:.4f}",
            f"{row['largest_difference']:.2e}",
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['peak_bytes'] / 2**20:.1f}" if row["peak_bytes"] else "",
        ]
        for row in rows
    ]
    return joined(TEXT.format(**machine["model"]), markdown(header, lines))
