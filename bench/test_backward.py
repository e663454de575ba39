"""The benchmark of the backward beside the floor, ``F.layer_norm``'s and its peers', values checked first.

    pytest bench/test_backward.py --benchmark-json=build/backward.json
    python bench/table.py build/backward.json

The groups of cells (target, sweep, rows, dx) stand first in the names of the tests, so that ``-k`` can choose.
The statistics in the JSON are device seconds a call, cold, or host seconds where ``kind`` says so (see
harness.py); ``extra_info`` holds the rest. A peer that is missing, refuses a shape or is wrong there is skipped
with the reason.
"""

import functools

import bwd_contenders
import pytest
import torch
import training_step
from bwd_contenders import LINEUP, OURS
from harness import CLOCK, record
from norm_cells import BACKWARD_CELLS, DTYPES, F16, Cell

from fastln import _timing

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: this measures CUDA device time, and torch sees none"
)

CASES = [
    pytest.param(cell, name, id=f"{'+'.join(cell.groups)}-{cell.id}-{name}")
    for cell in BACKWARD_CELLS
    for name in LINEUP.names(cell)
]

#: A backward should take at most this many times the floor, and these seconds more for its launches.
TARGET_FLOORS, TARGET_SECONDS = 1.15, 2e-6

#: Small enough for the host to be what takes the time.
HOST_CELLS = [Cell(16, 4096, dtype, ("host",)) for dtype in DTYPES]
#: Large enough for the tensors to be what takes the memory; then many rows to sum over, many columns, and one row.
MEMORY_CELLS = [Cell(4096, 4096, dtype, ("memory",)) for dtype in DTYPES]
MEMORY_CELLS += [Cell(*shape, F16, ("memory",)) for shape in ((65536, 128), (512, 65536), (1, 8192))]


@torch.no_grad()
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("cell", "name"), CASES)
def test_backward(benchmark, cell, name):
    arguments = LINEUP.rotation(cell)[0]
    benchmark.group = f"{cell.id} dx alone" if cell.dx_alone else cell.id
    with LINEUP.peers_may_fail(name):
        call = LINEUP.factories[name](cell)
        try:
            errors = bwd_contenders.verify(name, cell, call(*arguments), arguments)
        except AssertionError as error:
            if LINEUP.kind(name) != "torch":
                raise
            # Of 2^17 rows and more, torch's own dweight is not right in halves; its time still is what it takes.
            errors = {}
            benchmark.extra_info["inaccurate"] = str(error)
        seconds = LINEUP.record(benchmark, name, cell, call)
    if seconds is None:
        return  # --benchmark-disable: the values were checked, and that is all
    benchmark.extra_info |= LINEUP.facts(name, cell, seconds, bwd_contenders.bytes_moved(name, cell))
    benchmark.extra_info |= {f"max_error_{what}": error for what, error in errors.items()}
    benchmark.extra_info["dx_alone"] = cell.dx_alone
    if name == OURS:
        target = TARGET_FLOORS * LINEUP.median(LINEUP.floor, cell) + TARGET_SECONDS
        benchmark.extra_info |= {"target_seconds": target, "target_met": seconds <= target}


def each_norm(cells):
    """Each cell with ``F.layer_norm`` and with ours."""
    cases = [(cell, name) for cell in cells for name in training_step.NORMS]
    ids = [f"{cell.groups[0]}-{cell.id}-{name}" for cell, name in cases]
    return pytest.mark.parametrize(("cell", "name"), cases, ids=ids)


def step_with_right_gradients(name, cell):
    """A training step that has been run once, and whose gradients are right."""
    step = training_step.make(name, cell)
    step()
    saved = (step.dy, step.x.detach(), None, None, step.weight.detach(), step.bias.detach())
    bwd_contenders.verify(name, cell, step.gradients, saved)
    return step


@pytest.mark.benchmark(timer=CLOCK)
@each_norm(HOST_CELLS)
def test_step_host_time(benchmark, cell, name):
    """Host time of a forward and its ``backward()``, the GPU's work not waited for."""
    step = step_with_right_gradients(name, cell)
    benchmark.group = f"host time of a step, {cell.id}"
    record(benchmark, functools.partial(_timing.host_time, step, (), batches=5), rounds=5)
    benchmark.extra_info |= step_facts("host", name, cell)


@pytest.mark.benchmark(timer=CLOCK)
@each_norm(MEMORY_CELLS)
def test_step_peak_memory(benchmark, cell, name):
    """What a step allocates at its worst moment; the statistics are its wall time."""
    step = step_with_right_gradients(name, cell)
    benchmark.group = f"memory of a step, {cell.id}"
    record(benchmark, functools.partial(training_step.wall_seconds, step), rounds=5)
    benchmark.extra_info |= step_facts("memory", name, cell) | {"peak_bytes": training_step.peak_bytes(step)}


def step_facts(kind, name, cell):
    return {
        "suite": LINEUP.suite,
        "name": name,
        "kind": kind,
        "groups": list(cell.groups),
        "rows": cell.rows,
        "cols": cell.cols,
        "dtype": cell.dtype_name,
        "dx_alone": False,
    }
