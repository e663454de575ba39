"""The benchmark's own arithmetic: its cells, what it calls right, tables and pictures of its results, training runs."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"


@pytest.fixture(autouse=True)
def bench_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def cells():
    import norm_cells

    return norm_cells


# ------------------------------------------------------------------------------------------------ cells


def test_backward_has_every_cell_with_a_target_whole_and_as_dx_alone(cells):
    whole = {(*c.shape, c.dtype) for c in cells.BACKWARD_CELLS if "target" in c.groups}
    alone = {(*c.shape, c.dtype) for c in cells.BACKWARD_CELLS if c.dx_alone}
    assert len(whole) == 25 and whole == alone
    assert {(512, 65536, torch.float16), (32768, 256, torch.bfloat16), (4096, 4096, torch.float32)} <= whole


def test_no_cell_is_measured_twice(cells):
    for measured in (cells.CELLS, cells.BACKWARD_CELLS):
        keys = [(c.id, c.dx_alone) for c in measured]
        assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sweep_of_the_backward_holds_64_to_128_mib_from_64_to_262144_columns(cells, dtype):
    sweep = [c for c in cells.BACKWARD_CELLS if "sweep" in c.groups and c.dtype == dtype]
    assert (min(c.cols for c in sweep), max(c.cols for c in sweep), len(sweep)) == (64, 262144, 32)
    assert all(64 << 20 < c.rows * c.cols * dtype.itemsize <= 128 << 20 for c in sweep)


# --------------------------------------------------------------------------------------------- contenders


def test_peers_run_in_their_cells_alone_and_ours_runs_last(cells):
    from lineup import Lineup

    lineup = Lineup("s", dict.fromkeys(["floor", "F.layer_norm", "peer", "ours"]), {"peer": has_target}, rotation=None)
    inside, outside = (cells.Cell(2, 8, torch.float16, (group,)) for group in ("target", "sweep"))
    assert lineup.names(inside) == ["floor", "F.layer_norm", "peer", "ours"]
    assert lineup.names(outside) == ["floor", "F.layer_norm", "ours"]
    assert [lineup.kind(name) for name in lineup.factories] == ["floor", "torch", "peer", "op"]


def has_target(cell):
    return "target" in cell.groups


def test_facts_of_a_contender_follow_from_the_medians_of_its_cell(cells):
    from lineup import Lineup

    cell = cells.Cell(2, 8, torch.float16, ("target",))
    lineup = Lineup("s", dict.fromkeys(["floor", "F.layer_norm", "peer", "ours"]), {"peer": has_target}, rotation=None)
    lineup.medians = {("floor", cell): 2e-6, ("F.layer_norm", cell): 12e-6, ("peer", cell): 6e-6}
    facts = lineup.facts("ours", cell, 3e-6, nbytes=3000)
    assert facts["speedup_over_layer_norm"] == pytest.approx(4)
    assert facts["time_over_floor"] == pytest.approx(1.5)
    assert facts["gb_per_second"] == pytest.approx(1)
    assert (facts["best_peer"], facts["speedup_over_best_peer"]) == ("peer", pytest.approx(2))
    assert "best_peer" not in lineup.facts("peer", cell, 6e-6, nbytes=3000)


@pytest.mark.parametrize("cols", [100, 512, 1280, 4096, 20480, 65536])
def test_every_variant_that_tuning_times_can_be_run(cols):
    import tune

    from fastln import _plan

    plans = tune.variants(cols, torch.float16)
    read = [{key: int(value) for key, value in (part.split("=") for part in plan.split(","))} for plan in plans]
    assert plans and all(_plan._runnable(**plan) for plan in read)
    assert cols != 1280 or "pieces=5,threads=32,cluster=1" in plans


# ------------------------------------------------------------------------- what is right in the backward


def backward_case(cells, dtype, dx_alone=False, rows=300, cols=40):
    """A cell, arguments of the backward there, and right gradients, of autograd in float64."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, rows, cols).to(dtype)
    weight, bias = torch.rand(2, cols).to(dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    torch.nn.functional.layer_norm(leaves[0], (cols,), *leaves[1:]).backward(dy.double())
    gradients = [leaf.grad.to(dtype) for leaf in leaves]
    if dx_alone:
        gradients[1:] = None, None
    cell = cells.Cell(rows, cols, dtype, ("target",), dx_alone)
    return cell, (dy, x, None, None, weight, bias), gradients


@pytest.mark.parametrize("dx_alone", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_autograd_in_float64_are_right(cells, dtype, dx_alone, monkeypatch):
    import bwd_contenders

    monkeypatch.setattr(bwd_contenders, "_CHUNK", 1000)  # several chunks of rows, the last one shorter
    cell, arguments, gradients = backward_case(cells, dtype, dx_alone)
    errors = bwd_contenders.verify("someone", cell, gradients, arguments)
    assert list(errors) == ["dx"] if dx_alone else ["dx", "dweight", "dbias"]


def not_a_number_in_dx(gradients, dy):
    gradients[0][-1, -1] = math.nan


def row_missing_from_dweight(gradients, dy):
    gradients[1] -= dy[-1]  # of the size that one row has


def row_missing_from_dbias(gradients, dy):
    gradients[2] -= dy[-1]


def dweight_in_another_dtype(gradients, dy):
    gradients[1] = gradients[1].double()


def dbias_not_given(gradients, dy):
    gradients[2] = None


WRONG = {
    not_a_number_in_dx: "dx of someone is off by up to nan",
    row_missing_from_dweight: "dweight of someone is off",
    row_missing_from_dbias: "dbias of someone is off",
    dweight_in_another_dtype: "someone gave dweight as",
    dbias_not_given: "someone gave dbias as None",
}


@pytest.mark.parametrize("spoil", WRONG)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wrong_gradients_are_not_timed(cells, dtype, spoil):
    import bwd_contenders

    cell, arguments, gradients = backward_case(cells, dtype)
    spoil(gradients, arguments[0])
    with pytest.raises(AssertionError, match=WRONG[spoil]):
        bwd_contenders.verify("someone", cell, gradients, arguments)


def test_a_gradient_that_was_not_asked_for_is_wrong(cells):
    import bwd_contenders

    cell, arguments, _ = backward_case(cells, torch.float32, dx_alone=True)
    _, _, gradients = backward_case(cells, torch.float32)
    with pytest.raises(AssertionError, match=r"dweight as .*expected None"):
        bwd_contenders.verify("someone", cell, gradients, arguments)


# ------------------------------------------------------------------------------------------------ tables

MACHINE = {
    "gpu": {"name": "A GPU", "multiprocessors": 1, "l2_bytes": 60 << 20, "driver": "1.2"},
    "torch": "2.14",
    "fastln": "0.1.0",
    "build": {"nvcc": "13.0"},
    "date": "2026-01-01",
}
KINDS = {"torch.add": "floor", "copy": "floor", "F.layer_norm": "torch", "torch.compile": "peer", "Liger": "peer"}


def backward_rows(microseconds, cols=512, groups=("target",), dx_alone=False, dtype="float16"):
    """Rows of one cell of the backward by contender, as the JSON has them; ``ours`` stands for our op."""
    rows = []
    for name, time in microseconds.items():
        row = {"suite": "backward", "name": name, "kind": KINDS.get(name, "op"), "seconds": time * 1e-6}
        row |= {"dtype": dtype, "rows": 4096, "cols": cols, "groups": list(groups), "dx_alone": dx_alone}
        row |= {"bytes": 12 * 1024 * cols, "gb_per_second": 1234.5}
        if name == "ours":
            target = 1.15 * microseconds.get("torch.add", 0) + 2
            row |= {"target_seconds": target * 1e-6, "target_met": time <= target}
        rows.append(row)
    return rows


def step_rows(kind, theirs, ours):
    facts = {"suite": "backward", "kind": kind, "groups": [kind], "dtype": "float16", "rows": 16, "cols": 64}
    facts["dx_alone"] = False
    figure = {"host": "seconds", "memory": "peak_bytes"}[kind]
    figures = {"F.layer_norm": theirs, "fastln.layer_norm": ours}
    return [facts | {"seconds": 1.0, "name": name, figure: value} for name, value in figures.items()]


def line_with(text, beginning):
    """The cells of the one line of a Markdown table that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {beginning} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


MET = {"torch.add": 10, "F.layer_norm": 40, "torch.compile": 20, "Liger": 30, "ours": 12.5}
MISSED = {"torch.add": 10, "F.layer_norm": 40, "torch.compile": 20, "Liger": 15, "ours": 20}


def backward_sections(*rows):
    import bwd_table

    return bwd_table.sections(MACHINE, [row for some in rows for row in some])


def test_shape_of_the_backward_shows_times_ratios_and_whether_the_target_is_met():
    text = backward_sections(backward_rows(MET), backward_rows(MISSED, cols=1024))["backward"]
    times = ["**12.50**", "40.00", "20.00", "30.00", "10.00"]
    expected = ["4096x512", "main", *times, "3.20x", "1.60x", "1.250", "13.50", "yes", "1234"]
    assert line_with(text, "4096x512") == expected
    assert line_with(text, "4096x1024")[7:12] == ["2.00x", "0.75x", "2.000", "13.50", "**no**"]


def test_means_of_the_backward_are_geometric_and_count_targets_and_peers():
    alone = {name: time for name, time in MET.items() if KINDS.get(name) != "peer"}
    liger = {name: time for name, time in MISSED.items() if name != "torch.compile"}
    rows = backward_rows(MET), backward_rows(liger, cols=1024, dtype="float32")
    text = backward_sections(*rows, backward_rows(alone, groups=["dx"], dx_alone=True))["backward_means"]
    assert line_with(text, "Main shapes")[1:] == ["2", "2.53x", "2 (1)", "1.10x", "1.581", "1 of 2"]
    assert line_with(text, "of these, float32")[1:] == ["1", "2.00x", "1 (0)", "0.75x", "2.000", "0 of 1"]
    assert line_with(text, "dx alone, the main shapes")[1:] == ["1", "3.20x", "0 (0)", "", "1.250", "1 of 1"]
    assert line_with(text, "All shapes but dx alone, each once")[1] == "2"
    assert "the mean over `F.layer_norm` would be 2.96x" in text


def test_misses_of_the_backward_are_listed_worst_first_and_by_cause():
    found = backward_sections(
        backward_rows(MISSED),
        backward_rows(MISSED | {"ours": 27}, 1024),
        backward_rows(MET, 64),
        backward_rows(MISSED, 65),
    )
    pairs = "| float16 4096x1024 | 2.000 | float16 4096x512 | 1.481 | float16 4096x65 | 1.481 |"
    assert "3 of 4 shapes miss the target:" in found["backward"] and pairs in found["backward"]
    losses = found["backward_losses"]
    assert line_with(losses, "float16 4096x1024") == ["float16 4096x1024", "Liger", "0.556x"]
    assert losses.index("| float16 4096x1024 |") < losses.index("| float16 4096x512 |")
    assert "a peer is ahead (3 of 4)" in losses
    assert line_with(losses, "no multiple of 16 bytes")[1:4] == ["1", "1.48", "float16 4096x65"]
    assert line_with(losses, "the others")[1:4] == ["2", "1.48 to 2.00", "float16 4096x1024"]


@pytest.mark.parametrize("missing", ["ours", "torch.add", "F.layer_norm"])
def test_shape_that_was_not_measured_whole_has_no_line(missing):
    measured = {name: time for name, time in MET.items() if name != missing}
    text = backward_sections(backward_rows(measured), backward_rows(MET, cols=1024))["backward"]
    assert "4096x512" not in text and "4096x1024" in text


def test_step_of_the_backward_stands_beside_torch():
    found = backward_sections(step_rows("host", 40e-6, 50e-6), step_rows("memory", 4_000_000, 3_000_000))
    assert line_with(found["backward_host"], "float16 16x64")[1:] == ["40.00", "50.00", "1.250"]
    assert line_with(found["backward_memory"], "float16 16x64")[1:] == ["4,000,000", "3,000,000", "0.750"]
    assert "(float16 16x64) cost the host 1.25 times" in found["backward_host_short"]


def forward_rows(microseconds, shape=(4096, 512), groups=("target",), dtype="float16", **facts):
    """Rows of one cell of layer_norm by contender."""
    rows = []
    for name, time in microseconds.items():
        row = {"suite": "layer_norm", "name": name, "kind": KINDS.get(name, "op"), "seconds": time * 1e-6}
        row |= {"dtype": dtype, "rows": shape[0], "cols": shape[1], "groups": list(groups), "gb_per_second": 1234.5}
        row |= {"bytes": 2 * shape[0] * shape[1] * (4 if dtype == "float32" else 2)}
        rows.append(row | facts)
    return rows


def forward_sections(*rows):
    import norm_table

    return norm_table.sections(MACHINE, [row for some in rows for row in some])


FORWARD = {"copy": 10, "F.layer_norm": 40, "torch.compile": 20, "Liger": 15, "fastln.layer_norm": 12.5}
ALONE = {name: time for name, time in FORWARD.items() if KINDS.get(name) != "peer"}
PAST_L2 = 65536, 512


def test_shape_of_the_forward_shows_groups_times_and_ratios():
    found = forward_sections(
        forward_rows(FORWARD),
        forward_rows(ALONE, PAST_L2, groups=["sweep", "odd"]),
        forward_rows(ALONE, dtype="float32"),
    )
    text = found["layer_norm"]
    halves, _, floats = text.partition("| float32, rows x cols")
    times = ["**12.50**", "40.00", "20.00", "15.00", "10.00"]
    assert line_with(halves, "4096x512")[1:] == ["main", *times, "3.20x", "1.20x", "(1.250)", "1234"]
    alone = ["**12.50**", "40.00", "", "", "10.00", "3.20x", "", "1.250", "1234"]
    assert line_with(halves, "65536x512")[1:] == ["sweep, odd", *alone]
    assert line_with(floats, "4096x512")[-3] == ""
    assert "Of 1 shapes past L2, 1 take more than 1.03 times the copy:" in text


def test_means_over_the_best_peer_leave_out_shapes_without_one():
    found = forward_sections(
        forward_rows(FORWARD), forward_rows(FORWARD | {"Liger": 10}, dtype="float32"), forward_rows(ALONE, PAST_L2)
    )
    text = found["layer_norm_means"]
    assert line_with(text, "Main shapes")[1:] == ["3", "3.20x", "2 (2)", "0.98x", "1.250 (1)"]
    assert line_with(text, "of these, float16")[1:] == ["2", "3.20x", "1 (1)", "1.20x", "1.250 (1)"]
    assert line_with(text, "of these, float32")[1:] == ["1", "3.20x", "1 (1)", "0.80x", ""]
    assert "float32 (1 shapes) 3.20x and 0.80x" in found["layer_norm_short"]
    assert "the mean over `F.layer_norm` would be 4.00x" in text


def test_short_table_has_the_shapes_chosen_and_each_other_one_that_loses():
    chosen, loses = forward_rows(FORWARD, (4096, 4096)), forward_rows(FORWARD | {"Liger": 12}, (64, 64))
    text = forward_sections(loses, chosen, forward_rows(FORWARD, (32, 32)))["layer_norm_short"]
    assert re.findall(r"float16 (\d+x\d+) \|", text) == ["4096x4096", "64x64"]


def test_every_shape_over_the_copy_has_one_cause():
    many = [
        (shape, dtype) for shape in ((1 << 20, 257), (1 << 16, 640), (512, 1 << 20)) for dtype in ("float16", "float32")
    ]
    found = forward_sections(*(forward_rows(ALONE, shape, dtype=dtype) for shape, dtype in many))
    lines = found["layer_norm_losses"].splitlines()[2:]
    assert sum(int(line.split("|")[2]) for line in lines) == len(many)
    assert line_with(found["layer_norm_losses"], "more than 1 MB")[1:3] == ["2", "1.25"]


def test_odd_rows_stand_beside_even_ones_and_chains_beside_what_they_should_save():
    chain = forward_rows({"F.layer_norm": 100, "fastln.layer_norm": 80}, kind="chain", groups=["chain"])
    rows = forward_rows(FORWARD), forward_rows(FORWARD | {"fastln.layer_norm": 25}, (4096, 513), ["odd"])
    found = forward_sections(*rows, chain)
    odd = line_with(found["layer_norm_odd"], "float16 4096 x 513 and 512")
    assert odd[1:] == ["25.00", "12.50", "2.000", "40.00", "40.00"]
    assert line_with(found["layer_norm_chain"], "float16 4096x512 → 512x512")[3:] == ["+20.00", "+27.50"]
    assert "layer_norm_host" not in found


def test_host_times_stand_where_they_were_measured():
    measured = forward_rows(FORWARD, host_seconds=1e-5, host_seconds_inference_mode=2e-5)
    found = forward_sections(measured, forward_rows(FORWARD, PAST_L2))
    times = ["10.00", "10.00", "20.00", "20.00", "10.00", "10.00"]
    assert line_with(found["layer_norm_host"], "float16 4096x512")[1:] == times
    assert "65536x512" not in found["layer_norm_host"]


def named_row(name, seconds, accumulate="float32", kind="op", **facts):
    row = {"suite": "named", "name": name, "kind": kind, "seconds": seconds, "accumulate": accumulate}
    row |= {"dtype": "float16", "rows": 8, "cols": 64, "gb_per_second": 100.0}
    return row | {"speedup_over_layer_norm": 40e-6 / seconds} | facts


def test_best_named_op_is_one_that_accumulates_in_float32():
    import named_table

    rows = [
        named_row("copy", 5e-6, "", "floor"),
        named_row("F.layer_norm", 40e-6, "float32", "torch", host_seconds=3e-6),
        named_row("layer_norm_f16_f16", 10e-6, "float16", host_seconds=1e-6),
        named_row("layer_norm_f16_f32", 20e-6, host_seconds=2e-6),
        named_row("layer_norm_f16_f32.scalar", 8e-6, kind="scalar", tutorial_seconds=12e-6),
    ]
    found = named_table.sections(MACHINE, rows)
    first, *others = (line for line in found["named"].splitlines() if line.startswith("| 8x64 |"))
    assert first == "| 8x64 | 5.00 | 40.00 | 10.00 | **20.00** | 100 | 2.00x |" and not others
    assert "is, over `F.layer_norm`, 2.00x in float16 (1 shapes)" in found["named_short"]
    assert line_with(found["named"], "`f16_f32`")[1] == "12.00 → 8.00 (1.50x)"
    assert line_with(found["named"], "float16 8x64")[1:] == ["3.00", "1.00 to 2.00", "1.50x"]


def test_table_fills_the_section_between_its_markers_and_nothing_else(tmp_path):
    import table

    page = tmp_path / "page.md"
    page.write_text("above\n<!-- backward:begin -->\nold\n<!-- backward:end -->\nbelow\n")
    assert table.insert({"backward": "new", "backward_short": "unused"}, page) == ["backward"]
    assert page.read_text() == "above\n<!-- backward:begin -->\nnew\n<!-- backward:end -->\nbelow\n"
    assert table.insert({"layer_norm": "new"}, page) == []
    page.write_text("<!-- backward:end -->\n<!-- backward:begin -->\n")
    with pytest.raises(SystemExit, match="in the wrong order"):
        table.insert({"backward": "new"}, page)


# --------------------------------------------------------------------------------------------- documents

RESULTS = sorted((BENCH / "results").glob("*.json"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTION = re.compile(r"^<!-- (\w+):begin -->\n(.*?)^<!-- \1:end -->$", re.MULTILINE | re.DOTALL)
#: Sections of results that need not be there; until they are, their text was typed.
OPTIONAL = {"models_compiled"}


@pytest.fixture(scope="module")
def generated():
    """By name, the file and text of each section that the results committed make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import table

        found = {}
        for path in RESULTS:
            for name, text in table.sections(path).items():
                assert name not in found, f"{path.name} and {found[name][0]} both make the section {name}"
                found[name] = path.name, text
    return found


def placed():
    """Each section of the documents: document, name, text."""
    return [(path, name, text) for path in DOCUMENTS for name, text in SECTION.findall(path.read_text())]


def test_every_section_stands_in_one_document_and_every_marker_belongs_to_one(generated):
    names = [name for _, name, _ in placed()]
    assert len(set(names)) == len(names)
    assert set(generated) <= set(names) <= set(generated) | OPTIONAL
    assert sum(path.read_text().count(f":{end} -->") for path in DOCUMENTS for end in ("begin", "end")) == 2 * len(
        names
    )


@pytest.mark.parametrize(("path", "name", "text"), [pytest.param(*section, id=section[1]) for section in placed()])
def test_section_is_what_the_results_make(generated, path, name, text):
    if name in OPTIONAL - set(generated):
        pytest.skip("no results of this yet")
    file, expected = generated[name]
    assert text == f"{expected}\n", f"run: python bench/table.py bench/results/{file} --into {path.relative_to(ROOT)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_the_documents_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\(([\w./]*)(?:#([\w-]+))?\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        if anchor:
            assert anchor in headings(file.read_text()), f"{target}#{anchor}"


def headings(text):
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


# ---------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("results", "picture"),
    [
        ("h200-layer_norm.json", "layer_norm.svg"),
        ("h200-backward.json", "layer_norm_backward.svg"),
        ("h200-training.json", "training.svg"),
        ("h200-named.json", None),
    ],
)
def test_results_make_a_picture_with_a_panel_for_each_dtype(results, picture, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import plot

    made = tmp_path / "made.svg"
    monkeypatch.setattr(sys, "argv", ["plot.py", str(BENCH / "results" / results), str(made)])
    plot.main()
    text = made.read_text()
    _, rows = plot.figures.load(BENCH / "results" / results)
    assert all(f">{dtype}<" in text for dtype in {row["dtype"] for row in rows})
    if picture:  # another matplotlib draws other paths, but the same words
        assert words(text) == words((ROOT / "docs" / picture).read_text())


def words(svg):
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg)


INTERRUPTED = """
import os, signal
import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it

@pytest.mark.parametrize("cell", range(4))
def test_cell(benchmark, cell):
    benchmark.pedantic(lambda: cell < 2 or os.kill(os.getpid(), signal.SIGINT))
"""


def test_an_interrupted_run_keeps_what_it_has_measured(tmp_path):
    for name in ("conftest.py", "machine.py"):
        shutil.copy(BENCH / name, tmp_path)
    (tmp_path / "test_cells.py").write_text(INTERRUPTED)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--benchmark-json=results.json",
        "test_cells.py",
    ]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no part of xdist
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stdout
    rows = json.loads((tmp_path / "results.json").read_text())["benchmarks"]
    assert [row["name"] for row in rows] == ["test_cell[0]", "test_cell[1]"]


# ---------------------------------------------------------------------------------------------- training


@pytest.fixture
def tiny():
    """A model, and batches of random bytes, that train in a second."""
    import train_curve

    size = train_curve.Size(width=32, layers=1, heads=2, context=16, batch=4, steps=5)
    torch.manual_seed(0)
    return size, train_curve.batches(torch.randint(256, (1000,), dtype=torch.uint8), size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_lie_on_those_of_nn_layer_norm(tiny, dtype, device):
    import train_curve

    runs = train_curve.compare(dtype, *tiny, device)
    assert [run["name"] for run in runs] == ["nn.LayerNorm", "fastln", "float64"]
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert all(run["largest_difference"] < limit for run in runs)
    assert all(len(run["losses"]) == 5 and run["losses"][-1] < run["losses"][0] for run in runs)


def test_a_wrong_layer_norm_leaves_the_curve(tiny, monkeypatch):
    import train_curve

    class Forgetful(torch.nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.detach())

    monkeypatch.setattr(train_curve, "NORMS", train_curve.NORMS | {"fastln": Forgetful})
    run = train_curve.compare(torch.float32, *tiny, torch.device("cpu"))[1]
    assert run["largest_difference"] > 1e-3


def test_training_table_has_a_line_for_each_run():
    import training_table

    model = {"layers": 1, "width": 2, "steps": 3, "batch": 4, "context": 5}
    row = {"name": "fastln", "dtype": "float32", "losses": [5.0, 4.0], "largest_difference": 1.234e-5}
    row |= {"seconds": 0.012345, "peak_bytes": 3 << 19}
    text = training_table.document({"model": model}, [row])
    assert line_with(text, "float32 `fastln`")[1:] == ["5.0000", "4.0000", "1.23e-05", "12.35", "1.5"]
