"""bench/models.py runs and its results make tables."""

import json
import os
import subprocess
import sys

import pytest
from fresh import ROOT

BENCH = ROOT / "bench"


def script(name, *arguments):
    path = f"{BENCH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    command = [sys.executable, BENCH / name, *arguments]
    return subprocess.run(command, cwd="/", env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


@pytest.mark.slow
def test_small_models_are_timed_and_tabled(tmp_path):
    results = tmp_path / "models.json"
    small = [
        "--small",
        "--models",
        "GPT in",
        "--dtypes",
        "float32",
        "--engines",
        "eager",
        "--rounds",
        "2",
        "--seconds",
        "0",
        "--steps",
        "1",
    ]
    done = script("models.py", results, *small, "--no-host")
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text())["models"]
    assert {(row["direction"], row["variant"]) for row in rows} >= {
        (direction, variant) for direction in ("inference", "training") for variant in ("stock", "convert")
    }
    assert all(row["seconds"] > 0 and row["norms"] == 5 for row in rows)
    assert all(row["over_stock"] == 1 for row in rows if row["variant"] == "stock")

    document = tmp_path / "page.md"
    document.write_text("Before.\n<!-- models:begin -->\n<!-- models:end -->\nAfter.\n")
    done = script("table.py", results, "--into", document)
    assert done.returncode == 0, done.stderr
    text = document.read_text()
    assert "| GPT in plain torch, float32 | 5 |" in text
    assert "| geometric mean |" in text


def model_row(variant, milliseconds, engine="compiled", direction="training", model="GPT", **facts):
    row = {"model": model, "dtype": "bfloat16", "engine": engine, "direction": direction, "variant": variant}
    return row | {"norms": 5, "rounds": 9, "seconds": milliseconds / 1e3, "over_stock": 10 / milliseconds} | facts


def document_of(rows, host=()):
    machine = {
        "gpu": {"name": "A GPU", "driver": "1.2"},
        "processor": "x",
        "torch": "2.14",
        "python": "3.12",
        "fastln": "0.1.0",
    }
    facts = {"rounds": 9, "steps": 5, "layers": 4, "width": 768, "missing": []}
    return facts | {"suite": "models", "machine": machine | {"date": "2026-01-01"}, "host": list(host), "models": rows}


HOST = [
    {"name": name, "grad": grad, "seconds": microseconds * 1e-6}
    for grad, times in ((False, (10, 12)), (True, (110, 99)))
    for name, microseconds in zip(("F.layer_norm", "fastln.layer_norm"), times, strict=True)
]


@pytest.fixture
def models_table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import models_table

    return models_table


def test_eager_and_compiled_models_make_sections_of_their_own(models_table):
    eager = [model_row("stock", 10, "eager"), model_row("convert", 8, "eager"), model_row("override", 12.5, "eager")]
    compiled = [model_row("stock", 10), model_row("convert", 8), model_row("convert, inductor", 10)]
    found = models_table.sections(document_of(eager + compiled, HOST))
    assert set(found) == {"models", "models_short", "models_compiled", "host"}
    assert "| GPT, bfloat16 | 5 | 10.00 | 8.00 (1.250x) | 12.50 (0.800x) |" in found["models"]
    assert "`fastln.convert` 1.250x as fast as stock (1.250x to 1.250x)" in found["models_short"]
    assert "compiled" not in found["models"] and "eager" not in found["models_compiled"]
    assert (
        "| compiled: model, dtype | norms | training: stock | convert | convert, inductor |" in found["models_compiled"]
    )
    assert set(models_table.sections(document_of(compiled, HOST))) == {"models_compiled"}


def test_models_of_which_some_variants_directions_or_widths_are_missing_have_empty_cells(models_table):
    rows = [model_row("stock", 10), model_row("convert", 8), model_row("stock", 10, direction="inference")]
    rows += [model_row("stock", 10, model="BERT", width=64), model_row("stock", 10, "reduce-overhead")]
    text = models_table.sections(document_of(rows))["models_compiled"]
    assert "width 64 to 768" in text
    assert "| compiled: model, width, dtype | norms | inference: stock | training: stock | convert |" in text
    assert "| GPT, width 768, bfloat16 | 5 | 10.00 | 10.00 | 8.00 (1.250x) |" in text
    assert "| BERT, width 64, bfloat16 | 5 |  | 10.00 |  |" in text
    assert "| reduce-overhead: model, dtype | norms | training: stock |" in text


def test_host_times_stand_beside_those_of_torch(models_table):
    found = models_table.sections(document_of([], HOST))
    assert set(found) == {"host"}
    assert "| F.layer_norm | 10.00 | 110.0 |" in found["host"]
    assert "| fastln.layer_norm | 12.00 (1.20) | 99.00 (0.90) |" in found["host"]


def test_a_model_or_dtype_of_another_name_is_refused(tmp_path):
    done = script("models.py", tmp_path / "models.json", "--small", "--dtypes", "float8")
    assert done.returncode == 2
    assert "expected some of float32, bfloat16, autocast, got float8" in done.stderr
