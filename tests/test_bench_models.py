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
    assert "| GPT in plain torch, float32, training | 5 |" in text
    assert "| geometric mean |" in text


def test_a_model_or_dtype_of_another_name_is_refused(tmp_path):
    done = script("models.py", tmp_path / "models.json", "--small", "--dtypes", "float8")
    assert done.returncode == 2
    assert "expected some of float32, bfloat16, autocast, got float8" in done.stderr
