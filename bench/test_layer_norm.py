"""The benchmark of ``fastln.layer_norm`` beside the copy, ``F.layer_norm`` and its peers, values checked first.

    pytest bench/test_layer_norm.py --benchmark-json=build/layer_norm.json
    python bench/table.py build/layer_norm.json

The statistics in the JSON are device seconds a call (see harness.py), cold; ``extra_info`` holds the rest.
A peer that is missing, refuses a shape or is wrong there is skipped with the reason.
"""

import contenders
import norm_contenders
import pytest
import torch
from cell_results import OURS, THEIRS
from harness import CLOCK, record_device_time
from norm_cells import CELLS, F16, Cell
from norm_contenders import LINEUP

from fastln import _compare, _timing

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: this measures CUDA device time, and torch sees none"
)

#: Host time is measured up to this size of input: beyond it, the GPU can be what holds the host up.
HOST_TIME_BYTES = 1 << 20

CASES = [pytest.param(cell, name, id=f"{cell.id}-{name}") for cell in CELLS for name in LINEUP.names(cell)]

#: Cells of the chain layer_norm → matmul: x, y and the square matrix fit L2 together.
CHAINS = (Cell(4096, 1024, F16, ("chain",)), Cell(4096, 2048, F16, ("chain",)))


def host_times(contender, x, weight, bias):
    """Host seconds of an eager call, in both modes of inference for ``F.layer_norm`` and ours.

    x is made in the mode that it is used in, as activations are; weight and bias are not.
    """
    modes = {"host_seconds": torch.no_grad, "host_seconds_inference_mode": torch.inference_mode}
    if LINEUP.kind(contender.name) == "peer":
        del modes["host_seconds_inference_mode"]
    found = {}
    for key, mode in modes.items():
        with mode():
            found[key] = _timing.host_time(*norm_contenders.eager_call(contender, x.clone(), weight, bias))
    return found


@torch.no_grad()
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("cell", "name"), CASES)
def test_layer_norm(benchmark, cell, name):
    work = contenders.workload(cell.shape, cell.dtype)
    x = work.inputs[0]
    benchmark.group = cell.id
    with LINEUP.peers_may_fail(name):
        contender = norm_contenders.make(name, cell)
        error = contenders.verify(contender, x, work.weight, work.bias)
        seconds = LINEUP.record(benchmark, name, cell, contender.call)
    if seconds is None:
        return  # --benchmark-disable: the values were checked, and that is all
    benchmark.extra_info |= LINEUP.facts(name, cell, seconds, contenders.bytes_moved(contender, x))
    benchmark.extra_info["max_error"] = error
    if x.nbytes <= HOST_TIME_BYTES and name != LINEUP.floor:
        benchmark.extra_info |= host_times(contender, x, work.weight, work.bias)


@torch.no_grad()
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("name", [THEIRS, OURS])
@pytest.mark.parametrize("cell", CHAINS, ids=lambda cell: f"{cell.rows}x{cell.cols}")
def test_chain(benchmark, cell, name):
    """Does the matmul find y in L2? A layer norm that is faster by itself may leave less there."""
    work = contenders.workload(cell.shape, cell.dtype)
    cols = cell.cols
    torch.manual_seed(1)
    matrix = torch.randn(cols, cols, dtype=cell.dtype, device=work.weight.device) / cols**0.5
    norm = LINEUP.factories[name](cell)

    def chain(x, weight, bias):
        return norm(x, weight, bias) @ matrix

    z = chain(*work.rotation[0]).double()
    reference = _compare.layer_norm_float64(*work.rotation[0])[0] @ matrix.double()
    error = float((z - reference).norm() / reference.norm())
    assert error < 2e-3, f"the chain with {name} is off by {error:.3g} of its norm from float64"
    benchmark.group = f"layer_norm → matmul, {cell.rows}x{cols}"

    seconds = record_device_time(benchmark, chain, work.rotation)
    if seconds is None:
        return
    benchmark.extra_info |= {
        "suite": "layer_norm",
        "name": name,
        "kind": "chain",
        "groups": list(cell.groups),
        "rows": cell.rows,
        "cols": cols,
        "dtype": cell.dtype_name,
        "relative_error": error,
    }
