"""The tables of the eight named ops."""

from __future__ import annotations

from figures import METHOD, geometric_mean, joined, machine_text, markdown, shape_text, us
from norm_table import COPY


def by_shape(rows: list[dict], **facts) -> dict[tuple[int, int], dict[str, dict]]:
    """The rows with these facts as {(rows, cols): {name: row}}, in the order of the file."""
    found: dict[tuple[int, int], dict[str, dict]] = {}
    for row in rows:
        if all(row[key] == value for key, value in facts.items()):
            found.setdefault((row["rows"], row["cols"]), {})[row["name"]] = row
    return found


def short(name: str) -> str:
    return name.removeprefix("layer_norm_").removesuffix(".scalar")


def code(name: str) -> str:
    return f"`{short(name)}`" if name not in ("copy", "naive") else name


def best_op(found: dict[str, dict]) -> dict | None:
    """The fastest of the ops that accumulate in float32: the others are there to be compared, not to be used."""
    usable = (row for row in found.values() if row["kind"] == "op" and row["accumulate"] == "float32")
    return min(usable, key=lambda row: row["seconds"], default=None)


def gains(rows: list[dict], dtype: str) -> list[float]:
    """How many times as fast as ``F.layer_norm`` the best op is, at each shape."""
    best = map(best_op, by_shape(rows, dtype=dtype).values())
    return [row["speedup_over_layer_norm"] for row in best if row]


def device_table(rows: list[dict], dtype: str) -> str:
    """Microseconds of every op at every shape; the best op is bold, its GB/s and speed-up stand last."""
    shapes = by_shape(rows, dtype=dtype)
    rowwise = {s: {n: r for n, r in names.items() if r["kind"] != "scalar"} for s, names in shapes.items()}
    names = list(dict.fromkeys(name for found in rowwise.values() for name in found))
    lines = []
    for shape, found in rowwise.items():
        cells = [us(found[n]["seconds"]) if n in found else "" for n in names]
        if best := best_op(found):
            i = names.index(best["name"])
            cells[i] = f"**{cells[i]}**"
            cells += [f"{best['gb_per_second']:.0f}", f"{best['speedup_over_layer_norm']:.2f}x"]
        else:
            cells += ["", ""]
        lines.append([shape_text(shape), *cells])
    header = [f"{dtype}, rows x cols", *map(code, names), "best op, GB/s", "over `F.layer_norm`"]
    found = gains(rows, dtype)
    return joined(markdown(header, lines), f"Geometric mean of the last column: {mean_of(found)}." if found else "")


def mean_of(found: list[float]) -> str:
    return f"{geometric_mean(found):.2f}x"


def tutorial_table(rows: list[dict]) -> str:
    """Our scalar overloads beside the tutorial's code at the cells where that was measured."""
    cells = {}
    for row in rows:
        if "tutorial_seconds" in row:
            key = short(row["name"]), shape_text((row["rows"], row["cols"]))
            cells[key] = row["tutorial_seconds"], row["seconds"]
    if not cells:
        return ""
    names, shapes = (list(dict.fromkeys(column)) for column in zip(*cells, strict=True))
    lines = [[f"`{name}`", *(beside(*cells[name, s]) if (name, s) in cells else "" for s in shapes)] for name in names]
    ratios = [theirs / ours for theirs, ours in cells.values()]
    note = f"Geometric mean {mean_of(ratios)}, least {min(ratios):.2f}x."
    return joined(markdown(["tutorial µs → scalar overload µs", *shapes], lines), note)


def beside(theirs: float, ours: float) -> str:
    return f"{us(theirs)} → {us(ours)} ({theirs / ours:.2f}x)"


def host_table(rows: list[dict]) -> str:
    """Host microseconds of one eager call under no_grad, where they were measured."""
    measured = [row for row in rows if "host_seconds" in row and row["kind"] != "floor"]
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in measured):
        for shape, found in by_shape(measured, dtype=dtype).items():
            ops = [r["host_seconds"] for r in found.values() if r["kind"] == "op"]
            torch_s = found["F.layer_norm"]["host_seconds"]
            cells = us(torch_s), f"{us(min(ops))} to {us(max(ops))}", f"{torch_s / max(ops):.2f}x"
            lines.append([f"{dtype} {shape_text(shape)}", *cells])
    header = ["host time of a call", "`F.layer_norm` µs", "ops µs", "`F.layer_norm` over slowest op"]
    return markdown(header, lines) if lines else ""


def short_sentence(rows: list[dict]) -> str:
    """The geometric means of the best op, by dtype."""
    found = {dtype: gains(rows, dtype) for dtype in dict.fromkeys(row["dtype"] for row in rows)}
    means = " and ".join(f"{mean_of(values)} in {dtype} ({len(values)} shapes)" for dtype, values in found.items())
    return f"The fastest of the eight named kernels that accumulate in float32 is, over `F.layer_norm`, {means}."


def sections(machine: dict, rows: list[dict]) -> dict[str, str]:
    """Each section that these rows have figures for, by name."""
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    note = (
        "Bold, and in the last two columns, is the fastest op that accumulates in float32; `naive` is the formula in "
        "torch's ops."
    )
    document = joined(
        f"{machine_text(machine)} {METHOD} {COPY} {note}",
        *(device_table(rows, dtype) for dtype in dtypes),
        tutorial_table(rows),
        host_table(rows),
    )
    return {"named": document, "named_short": short_sentence(rows)}
