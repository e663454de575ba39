"""mypy accepts right uses of the whole public API and refuses wrong ones."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import missing

import fastln

# --strict complains of an ignored line that has no error, so each of the last lines must have one.
USES = """
import torch
from torch import nn

import fastln

x = torch.randn(4, 8)
y: torch.Tensor = fastln.layer_norm(x, x.shape[-1:], None, None, eps=1e-5)
y = fastln.layer_norm(x, [8], torch.ones(8), bias=torch.zeros(8))

norm = fastln.LayerNorm(8, eps=1e-6, elementwise_affine=True, bias=False, device="cpu", dtype=torch.float16)
stock: nn.LayerNorm = norm
shape: tuple[int, ...] = fastln.LayerNorm([2, 8]).normalized_shape
y = norm(x)

model = nn.Sequential(norm, nn.Linear(8, 8))
conversion: fastln.Conversion = fastln.convert(model, also=[nn.LayerNorm])
count: int = conversion.count
texts: list[str] = [s.path + s.kind + s.reason for s in conversion.skipped]
skipped: list[fastln.Skipped] = conversion.skipped
conversion.undo()
with fastln.convert(model) as within:
    within.undo()

held: fastln.Override = fastln.override()
held.undo()
with fastln.override() as also_held:
    also_held.undo()
on: bool = fastln.overriding()

before: fastln.CompileMode = fastln.set_compile_mode("op", training="inductor")
fastln.set_compile_mode(*before)
mode: str = fastln.compile_mode().inference + fastln.compile_mode().training

plan: fastln.Plan = fastln.plan(768, torch.float16, clusters=True, wide_blocks=False)
number: int = plan.pieces + plan.threads + plan.cluster
kernel: fastln.Kernel = fastln.KERNELS[0]
name: str = kernel.name + kernel.qualname + kernel.element + kernel.accumulate
dtypes: list[torch.dtype] = [kernel.dtype, kernel.acc_dtype]
number = kernel.items + kernel.access
info: dict[str, object] = fastln.build_info()
version: str = fastln.__version__
fastln.distributed.register()

fastln.layer_norm("x", [8])  # type: ignore[arg-type]
fastln.layer_norm(x, 8)  # type: ignore[arg-type]
wrong: int = fastln.layer_norm(x, [8])  # type: ignore[assignment]
fastln.convert(3)  # type: ignore[arg-type]
fastln.convert(model, also=[nn.Linear])  # type: ignore[list-item]
fastln.override(True)  # type: ignore[call-arg]
fastln.set_compile_mode(1)  # type: ignore[arg-type]
fastln.plan("768")  # type: ignore[arg-type]
fastln.no_such_name  # type: ignore[attr-defined]
"""


@pytest.mark.slow
def test_mypy_accepts_right_uses_and_refuses_wrong_ones(tmp_path):
    if importlib.util.find_spec("mypy") is None:
        missing("mypy")
    package = Path(fastln.__file__).parent
    assert (package / "py.typed").exists()
    uses = tmp_path / "uses.py"
    uses.write_text(USES)
    # mypy finds what is in site-packages by itself, and nothing that PYTHONPATH names.
    installed = "site-packages" in package.parts
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}/cache", uses],
        cwd=tmp_path,
        env=os.environ | ({} if installed else {"MYPYPATH": str(package.parent)}),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr


def test_every_public_name_is_used():
    uncounted = {"__version__"}
    assert [name for name in fastln.__all__ if name not in uncounted and f"fastln.{name}" not in USES] == []
