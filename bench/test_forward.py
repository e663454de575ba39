"""The benchmark of the named ops: every op beside the copy, ``F.layer_norm`` and ``naive``, values checked first.

    pytest bench/test_forward.py --benchmark-json=build/bench.json
    python bench/table.py build/bench.json

The statistics in the JSON are device seconds a call (see harness.py), cold; ``extra_info`` holds the rest.
"""

import contenders
import pytest
import torch
import torch.nn.functional as F
import tutorial
from harness import CLOCK, record_device_time

from fastln import _compare, _timing

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: this measures CUDA device time, and torch sees none"
)

#: Host time is measured up to this size of input: beyond it, the GPU can be what holds the host up.
HOST_TIME_BYTES = 1 << 20

CASES = [
    pytest.param(shape, contender, id=f"{shape[0]}x{shape[1]}-{str(dtype)[6:]}-{contender.name}")
    for shape in contenders.SHAPES
    for dtype in contenders.DTYPES
    for contender in contenders.forward(shape, dtype)
]

#: Medians of this session by (name, shape, dtype), in seconds.
medians: dict[tuple, float] = {}


def median_of(name, shape, dtype):
    """The median that this session measured for ``name``, measured now if its test did not run."""
    key = (name, shape, dtype)
    if key not in medians:
        call = {"copy": contenders.copy, "F.layer_norm": _compare.baseline}[name]
        medians[key] = _timing.time_call(call, contenders.workload(shape, dtype).rotation)
    return medians[key]


@torch.no_grad()
def host_seconds(contender, x, weight, bias):
    """Host time of one eager call, as a user writes it."""
    if contender.name == "F.layer_norm":  # without the Python function of ours around it
        return _timing.host_time(F.layer_norm, (x, x.shape[-1:], weight, bias, _compare.EPS))
    return _timing.host_time(contender.call, (x, weight, bias))


@torch.no_grad()
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("shape", "contender"), CASES)
def test_forward(benchmark, shape, contender):
    dtype = contender.dtype
    work = contenders.workload(shape, dtype)
    x = work.inputs[0]
    error = contenders.verify(contender, x, work.weight, work.bias)
    benchmark.group = f"{shape[0]}x{shape[1]} {str(dtype).removeprefix('torch.')}"

    seconds = record_device_time(benchmark, contender.call, work.rotation)
    if seconds is None:
        return  # --benchmark-disable: the values were checked, and that is all
    medians[contender.name, shape, dtype] = seconds
    nbytes = contenders.bytes_moved(contender, x)
    benchmark.extra_info |= {
        "suite": "named",
        "name": contender.name,
        "kind": contenders.kind(contender),
        "rows": shape[0],
        "cols": shape[1],
        "dtype": str(dtype).removeprefix("torch."),
        "accumulate": contender.accumulate,
        "max_error": error,
        "bytes": nbytes,
        "gb_per_second": nbytes / seconds / 1e9,
        "speedup_over_layer_norm": median_of("F.layer_norm", shape, dtype) / seconds,
        "time_over_copy": seconds / median_of("copy", shape, dtype),
    }
    if x.nbytes <= HOST_TIME_BYTES:
        benchmark.extra_info["host_seconds"] = host_seconds(contender, x, work.weight, work.bias)
    if contenders.kind(contender) == "scalar" and tutorial.seconds(contender.name, shape):
        benchmark.extra_info["tutorial_seconds"] = tutorial.seconds(contender.name, shape)
