"""The benchmark of ``fastln.layer_norm`` beside the copy, ``F.layer_norm`` and its peers, values checked first.

    pytest bench/test_layer_norm.py --benchmark-json=build/layer_norm.json
    python bench/table.py build/layer_norm.json

The statistics in the JSON are device seconds a call (see harness.py), cold; ``extra_info`` holds the rest.
A peer that is missing, refuses a shape or is wrong there is skipped with the reason.
"""

import contextlib

import contenders
import norm_contenders
import pytest
import torch
from harness import CLOCK, record_device_time
from norm_cells import CELLS, F16
from norm_contenders import OURS

from fastln import _compare, _timing

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: this measures CUDA device time, and torch sees none"
)

#: Host time is measured up to this size of input: beyond it, the GPU can be what holds the host up.
HOST_TIME_BYTES = 1 << 20

CASES = [pytest.param(cell, name, id=f"{cell.id}-{name}") for cell in CELLS for name in norm_contenders.names(cell)]

#: Shapes of the chain layer_norm → matmul: x, y and the square matrix fit L2 together.
CHAINS = ((4096, 1024), (4096, 2048))

#: Medians of this session in seconds, by (name, shape, dtype).
medians: dict[tuple, float] = {}


def median_of(name, cell):
    """The median that this session measured for ``name``, measured now if its test did not run."""
    key = (name, cell.shape, cell.dtype)
    if key not in medians:
        call = norm_contenders.make(name, cell.dtype).call
        medians[key] = _timing.time_call(call, contenders.workload(cell.shape, cell.dtype).rotation)
    return medians[key]


def best_peer(cell):
    """Name and seconds of the fastest of ``F.layer_norm`` and the peers that this session measured here."""
    measured = {"F.layer_norm": median_of("F.layer_norm", cell)}
    for name in norm_contenders.PEERS:
        if (name, cell.shape, cell.dtype) in medians:
            measured[name] = medians[name, cell.shape, cell.dtype]
    return min(measured.items(), key=lambda item: item[1])


@contextlib.contextmanager
def peers_may_fail(name):
    """Skips the test when a peer fails: that is no fault of ours."""
    try:
        yield
    except Exception as error:
        if norm_contenders.kind(name) != "peer":
            raise
        text = str(error).strip() or type(error).__name__
        pytest.skip(f"{name}: {text.splitlines()[0][:200]}")


def host_times(contender, x, weight, bias):
    """Host seconds of an eager call, in both modes of inference for ``F.layer_norm`` and ours.

    x is made in the mode that it is used in, as activations are; weight and bias are not.
    """
    modes = {"host_seconds": torch.no_grad, "host_seconds_inference_mode": torch.inference_mode}
    if norm_contenders.kind(contender.name) == "peer":
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
    with peers_may_fail(name):
        contender = norm_contenders.make(name, cell.dtype)
        error = contenders.verify(contender, x, work.weight, work.bias)
        seconds = record_device_time(benchmark, contender.call, work.rotation)
    if seconds is None:
        return  # --benchmark-disable: the values were checked, and that is all
    medians[name, cell.shape, cell.dtype] = seconds
    nbytes = contenders.bytes_moved(contender, x)
    benchmark.extra_info |= {
        "suite": "layer_norm",
        "name": name,
        "kind": norm_contenders.kind(name),
        "groups": list(cell.groups),
        "rows": cell.rows,
        "cols": cell.cols,
        "dtype": cell.dtype_name,
        "max_error": error,
        "bytes": nbytes,
        "gb_per_second": nbytes / seconds / 1e9,
        "speedup_over_layer_norm": median_of("F.layer_norm", cell) / seconds,
        "time_over_copy": seconds / median_of("copy", cell),
    }
    if name == OURS:
        peer, peer_seconds = best_peer(cell)
        benchmark.extra_info |= {"best_peer": peer, "speedup_over_best_peer": peer_seconds / seconds}
    if x.nbytes <= HOST_TIME_BYTES and name != "copy":
        benchmark.extra_info |= host_times(contender, x, work.weight, work.bias)


@torch.no_grad()
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("name", ["F.layer_norm", OURS])
@pytest.mark.parametrize("shape", CHAINS, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_chain(benchmark, shape, name):
    """Does the matmul find y in L2? A layer norm that is faster by itself may leave less there."""
    work = contenders.workload(shape, F16)
    cols = shape[1]
    torch.manual_seed(1)
    matrix = torch.randn(cols, cols, dtype=F16, device=work.weight.device) / cols**0.5
    norm = norm_contenders.make(name, F16).call

    def chain(x, weight, bias):
        return norm(x, weight, bias) @ matrix

    z = chain(*work.rotation[0]).double()
    reference = _compare.layer_norm_float64(*work.rotation[0])[0] @ matrix.double()
    error = float((z - reference).norm() / reference.norm())
    assert error < 2e-3, f"the chain with {name} is off by {error:.3g} of its norm from float64"
    benchmark.group = f"layer_norm → matmul, {shape[0]}x{cols}"

    seconds = record_device_time(benchmark, chain, work.rotation)
    if seconds is None:
        return
    benchmark.extra_info |= {
        "suite": "layer_norm",
        "name": name,
        "kind": "chain",
        "groups": ["chain"],
        "rows": shape[0],
        "cols": cols,
        "dtype": "float16",
        "relative_error": error,
    }
