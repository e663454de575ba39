"""How long one call takes: device time on a GPU, wall time on a CPU.

``python -m fastln`` and the benchmark both time through this file, so their figures can be compared.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

#: The inputs of one round hold this many times the L2 cache, so that no call finds its input there.
L2_MULTIPLE = 4
#: Past this many, more inputs only make the graph larger: the copy before each replay empties L2 too.
MAX_INPUTS = 2048
#: Calls in one graph, at least: the cost of starting it must vanish beside them.
MIN_CALLS = 20
#: Replays of which the median counts, and those before them that do not.
REPLAYS = 11
WARM_UP = 2

#: torch's allocator aligns every tensor to this many bytes; so do the views that share one buffer.
_ALIGNMENT = 512

Call = Callable[..., object]
Arguments = Sequence[object]


def describe(device: torch.device) -> str:
    """One sentence on what the figures for ``device`` are."""
    if device.type == "cuda":
        return (
            f"device time a call: median of {REPLAYS} replays of a CUDA graph, cold (its calls rotate over "
            f"inputs of {L2_MULTIPLE} times the L2 cache)"
        )
    return "wall time a call, warm: the fastest of repeated calls with the same input"


def input_count(nbytes: int, device: torch.device) -> int:
    """How many inputs of ``nbytes`` to rotate over: one on a CPU, enough to overflow L2 on a GPU."""
    if device.type != "cuda":
        return 1
    wanted = math.ceil(L2_MULTIPLE * _l2_bytes(device) / nbytes)
    free, _ = torch.cuda.mem_get_info(device)
    fitting = free // 4 // (2 * nbytes)  # as many outputs as inputs are alive
    return max(1, min(max(wanted, 2), fitting, MAX_INPUTS))


def random_inputs(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Distinct standard normal inputs ``[rows, cols]`` to rotate over, all in one buffer."""
    numel = rows * cols
    count = input_count(numel * dtype.itemsize, device)
    items = _ALIGNMENT // dtype.itemsize
    stride = math.ceil(numel / items) * items
    buffer = torch.randn(count * stride, dtype=dtype, device=device)
    return [buffer[i * stride : i * stride + numel].view(rows, cols) for i in range(count)]


class DeviceTimer:
    """Device time of ``call(*arguments)``, cold, from replays of one CUDA graph.

    The graph calls once for each element of ``rotation`` in turn, and around again until there are
    ``MIN_CALLS``. The outputs of one round are alive together, so they rotate as the inputs do.
    Use it as a context manager: the graph holds on to the memory of its outputs.
    """

    def __init__(self, call: Call, rotation: Sequence[Arguments]) -> None:
        self.device = next(a.device for a in rotation[0] if isinstance(a, torch.Tensor))
        self.calls = len(rotation) * math.ceil(MIN_CALLS / len(rotation))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # what happens once (loading code, handles) stays out of the graph
                for arguments in rotation[:3]:
                    call(*arguments)
            torch.cuda.current_stream().wait_stream(stream)
            alive: deque[object] = deque(maxlen=len(rotation))
            with torch.cuda.graph(self._graph, stream=stream):
                for i in range(self.calls):
                    alive.append(call(*rotation[i % len(rotation)]))
            self._start = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)

    def __enter__(self) -> DeviceTimer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._graph.reset()

    def replay(self) -> float:
        """Seconds a call, over one replay."""
        with torch.cuda.device(self.device):
            # A large copy first. It leaves L2 as the rotation leaves it, full of other data that is
            # partly still to be written back, and it keeps the GPU busy while the host enqueues the
            # replay, so that the launch of the graph is not counted.
            source, target = _copy_buffers(self.device)
            target.copy_(source)
            self._start.record()
            self._graph.replay()
            self._end.record()
            self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3 / self.calls

    def median(self) -> float:
        """Seconds a call: the median of ``REPLAYS`` replays."""
        return statistics.median([self.replay() for _ in range(WARM_UP + REPLAYS)][WARM_UP:])


def wall_time(call: Call, arguments: Arguments, budget: float = 0.1) -> float:
    """Wall seconds of the fastest of at least three calls on a CPU, and of more while ``budget`` seconds last.

    The fastest, because the others tell what else ran on the machine: one descheduled thread of the
    pool costs milliseconds.
    """
    call(*arguments)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget and len(times) < 1000):
        start = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


def time_call(call: Call, rotation: Sequence[Arguments]) -> float:
    """Seconds a call, in the way that suits where the arguments live (see :func:`describe`)."""
    if any(isinstance(a, torch.Tensor) and a.is_cuda for a in rotation[0]):
        with DeviceTimer(call, rotation) as timer:
            return timer.median()
    return wall_time(call, rotation[0])


def host_time(call: Call, arguments: Arguments, batches: int = 21, calls: int = 50) -> float:
    """Host seconds that one eager call takes before it returns, the GPU's work not waited for.

    A batch stays well below the number of launches that the driver queues before it makes the host
    wait; the device is idle at the start of each. The figure means something for small tensors only.
    """
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(batches + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call(*arguments)
        times.append((time.perf_counter() - start) / calls)
    synchronize()
    return statistics.median(times[1:])  # the first batch warms up


def host_time_of_step(call: Call, arguments: Arguments, batches: int = 21, calls: int = 50) -> float:
    """Host seconds of one eager ``call`` and of ``backward()`` of its output, likewise.

    The arguments that require grad are leaves; they lose their gradients before each step, as an optimizer has it.
    """
    with torch.no_grad():
        grad_out = torch.ones_like(call(*arguments))
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        call(*arguments).backward(grad_out)

    with torch.enable_grad():
        return host_time(step, (), batches, calls)


def _l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


@functools.lru_cache(maxsize=1)
def _copy_buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target of a copy that moves far more than L2 holds."""
    source = torch.zeros(L2_MULTIPLE * _l2_bytes(device), dtype=torch.uint8, device=device)
    return source, torch.empty_like(source)
