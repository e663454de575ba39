"""The tables of the eight named ops."""

from __future__ import annotations

from figures import geometric_mean, markdown, shape_text, us


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


def device_table(rows: list[dict], dtype: str) -> str:
    """Microseconds of every op at every shape; the fastest op is bold, its GB/s and speed-up stand last."""
    shapes = by_shape(rows, dtype=dtype)
    rowwise = {s: {n: r for n, r in names.items() if r["kind"] != "scalar"} for s, names in shapes.items()}
    names = list(dict.fromkeys(name for found in rowwise.values() for name in found))
    lines, gains = [], []
    for shape, found in rowwise.items():
        best = min((r for r in found.values() if r["kind"] == "op"), key=lambda r: r["seconds"], default=None)
        cells = [us(found[n]["seconds"]) if n in found else "" for n in names]
        if best:
            i = names.index(best["name"])
            cells[i] = f"**{cells[i]}**"
            cells += [f"{best['gb_per_second']:.0f}", f"{best['speedup_over_layer_norm']:.2f}x"]
            gains.append(best["speedup_over_layer_norm"])
        lines.append([shape_text(shape), *cells])
    header = [f"{dtype}, rows x cols", *map(code, names), "best op, GB/s", "speed-up over `F.layer_norm`"]
    note = f"\n\nGeometric mean of the last column: {geometric_mean(gains):.2f}x." if gains else ""
    return markdown(header, lines) + note


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
    gains = [theirs / ours for theirs, ours in cells.values()]
    note = f"\n\nGeometric mean {geometric_mean(gains):.2f}x, least {min(gains):.2f}x."
    return markdown(["tutorial µs → scalar overload µs", *shapes], lines) + note


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


def document(rows: list[dict]) -> str:
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    parts = [*(device_table(rows, dtype) for dtype in dtypes), tutorial_table(rows), host_table(rows)]
    return "\n\n".join(part for part in parts if part)
