"""The benchmark's own arithmetic: its cells, what it calls right, the tables made of its results, and training runs."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"


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
KINDS = {"torch.add": "floor", "F.layer_norm": "torch", "torch.compile": "peer", "Liger": "peer"}


def backward_rows(microseconds, cols=512, groups=("target",), dx_alone=False):
    """Rows of one cell of the backward by contender, as the JSON has them; ``ours`` stands for our op."""
    rows = []
    for name, time in microseconds.items():
        row = {"suite": "backward", "name": name, "kind": KINDS.get(name, "op"), "seconds": time * 1e-6}
        row |= {"dtype": "float16", "rows": 4096, "cols": cols, "groups": list(groups), "dx_alone": dx_alone}
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


def test_cell_of_the_backward_shows_times_ratios_and_whether_the_target_is_met():
    import bwd_table

    text = bwd_table.document(MACHINE, backward_rows(MET) + backward_rows(MISSED, cols=1024))
    times = ["**12.50**", "40.00", "20.00", "30.00", "10.00"]
    expected = ["float16 4096x512", *times, "3.20x", "1.60x", "1.250", "13.50", "yes", "1234"]
    assert line_with(text, "float16 4096x512") == expected
    assert line_with(text, "float16 4096x1024")[6:11] == ["2.00x", "0.75x", "2.000", "13.50", "**no**"]


def test_means_of_the_backward_are_geometric_and_count_targets_and_peers():
    import bwd_table

    alone = {name: time for name, time in MET.items() if KINDS.get(name) != "peer"}
    rows = backward_rows(MET) + backward_rows(MISSED, cols=1024) + backward_rows(alone, groups=["dx"], dx_alone=True)
    text = bwd_table.summary_document(MACHINE, rows)
    assert line_with(text, "Cells with a target")[1:] == ["2", "2.53x", "1.10x (2)", "1.581", "1 of 2"]
    assert line_with(text, "dx alone, the same cells")[1:] == ["1", "3.20x", "", "1.250", "1 of 1"]
    assert line_with(text, "All cells but dx alone, each once")[1] == "2"


def test_misses_of_the_backward_are_listed_worst_first():
    import bwd_table

    worse = MISSED | {"ours": 27}
    text = bwd_table.summary_document(
        MACHINE, backward_rows(MISSED) + backward_rows(worse, 1024) + backward_rows(MET, 64)
    )
    assert "(of 3 cells; time in targets): 2: float16 4096x1024 (2.000), float16 4096x512 (1.481)." in text
    assert "(of 3 cells): 2: float16 4096x1024 (Liger, 0.556x), float16 4096x512 (Liger, 0.750x)." in text


@pytest.mark.parametrize("missing", ["ours", "torch.add", "F.layer_norm"])
def test_cell_that_was_not_measured_whole_has_no_line(missing):
    import bwd_table

    measured = {name: time for name, time in MET.items() if name != missing}
    text = bwd_table.document(MACHINE, backward_rows(measured) + backward_rows(MET, cols=1024))
    assert "4096x512" not in text and "4096x1024" in text


def test_step_of_the_backward_stands_beside_torch():
    import bwd_table

    rows = step_rows("host", 40e-6, 50e-6) + step_rows("memory", 4_000_000, 3_000_000)
    text = bwd_table.summary_document(MACHINE, rows)
    host, memory = (line.strip("| ") for line in text.splitlines() if line.startswith("| float16 16x64"))
    assert host == "float16 16x64 | 40.00 | 50.00 | 1.250"
    assert memory == "float16 16x64 | 4,000,000 | 3,000,000 | 0.750"


def test_table_fills_the_section_between_its_markers_and_nothing_else(tmp_path):
    import table

    page = tmp_path / "page.md"
    page.write_text("above\n<!-- backward:begin -->\nold\n<!-- backward:end -->\nbelow\n")
    table.insert({"backward": "new", "backward_short": "unused"}, page)
    assert page.read_text() == "above\n<!-- backward:begin -->\nnew\n<!-- backward:end -->\nbelow\n"
    with pytest.raises(SystemExit, match="none of the lines"):
        table.insert({"layer_norm": "new"}, page)


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
