"""Times whole models: stock, converted to fastln, and stock under ``fastln.override``. Needs a GPU, but for --small.

    python bench/models.py build/models.json
    python bench/models.py build/models.json --models GPT --dtypes bfloat16 --engines eager --layers 4
    python bench/models.py build/models-compiled.json --dtypes bfloat16 --engines compiled --layers 2 --no-host
    python bench/table.py build/models.json

A figure is the median over rounds of the time of a step, between two events on the GPU with a synchronized host
before, so that a host that falls behind counts. The variants of a model take turns within each round, so that a GPU
that grows warm serves all alike; models of short steps get more rounds. Before it is timed, a variant's output is held
against stock's. A training step is forward, loss, backward and fused AdamW. The host times are those of one call on a
tensor too small to keep the GPU busy.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import machine
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import fastln
from fastln import _timing

#: dtype of the parameters, and of autocast.
DTYPES = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}
DIRECTIONS = ("inference", "training")
#: Of models whose steps are short.
MOST_ROUNDS = 60
#: What may be off stock's output, relative to its largest value.
TOLERANCE = {"float32": 1e-2, "bfloat16": 1e-1, "autocast": 1e-1}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("results", type=Path, help="JSON file to write; kept up to date after each model")
    add("--models", default="", metavar="TEXT", help="only those with one of these, separated by commas, in their name")
    add("--dtypes", type=_some_of(DTYPES), default=["bfloat16", "autocast"], help="default: bfloat16,autocast")
    add("--directions", type=_some_of(DIRECTIONS), default=list(DIRECTIONS), help="default: both")
    add("--engines", type=_some_of(ENGINES), default=["eager", "compiled"], help="default: eager,compiled")
    add("--layers", type=int, default=zoo.BASE.depth, help="blocks of each model (default: %(default)s)")
    add("--width", type=int, default=zoo.BASE.width, help="columns of a norm, heads of 64 (default: %(default)s)")
    add("--batch", type=int, help="sequences a step, and eight times as many images")
    add("--rounds", type=int, default=15, help="at least (default: %(default)s)")
    add("--seconds", type=float, default=4, help="of rounds, where they are short (default: %(default)s)")
    add("--steps", type=int, default=5, help="steps a round (default: %(default)s)")
    add("--small", action="store_true", help="the tests' small models, to see whether it runs")
    add("--no-host", action="store_true", help="leave out the host times")
    options = parser.parse_args()
    wanted = [name.lower() for name in options.models.split(",") if name]
    options.entries = [e for e in zoo.ENTRIES if not wanted or any(name in e.name.lower() for name in wanted)]
    size = (
        zoo.SMALL
        if options.small
        else replace(zoo.BASE, depth=options.layers, width=options.width, heads=options.width // 64)
    )
    if options.batch:
        size = replace(size, batch=options.batch, images=8 * options.batch)
    options.size = size
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.device.type == "cpu" and not options.small:
        parser.error("needs an NVIDIA GPU and its driver, and torch sees none here; --small runs on a CPU")
    return options


def _some_of(known: object) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:  # type: ignore[operator]
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        return names

    return read


# -------------------------------------------------------------------------------------------- variants


def compiled(model: nn.Module, **options: str) -> Callable[[Tensor], object]:
    """The model, compiled in a frame of its own: Dynamo would else take one copy's graph for another's."""

    def run(x: Tensor) -> object:
        return model(x)

    run.__code__ = run.__code__.replace(co_name="run_a_model")
    return torch.compile(run, dynamic=False, **options)


#: How a model is called.
ENGINES: dict[str, Callable[[nn.Module], Callable[[Tensor], object]]] = {
    "eager": lambda model: model,
    "compiled": compiled,
    "reduce-overhead": lambda model: compiled(model, mode="reduce-overhead"),
}


class Variant:
    """One way to run a model, with a copy of its own."""

    def __init__(
        self,
        name: str,
        entry: zoo.Entry,
        model: nn.Module,
        engine: str,
        direction: str,
        autocast: torch.dtype | None,
    ) -> None:
        self.name, self.autocast, self.direction = name, autocast, direction
        self.model = copy.deepcopy(model).train(direction == "training")
        self.norms = entry.convert(self.model).count if name.startswith("convert") else 0
        self.call = ENGINES[engine](self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    @contextlib.contextmanager
    def _around(self, device: torch.device) -> Iterator[None]:
        mode = "inductor" if self.name == "convert, inductor" else "op"
        before = fastln.set_compile_mode(mode, mode)
        with contextlib.ExitStack() as stack:
            stack.callback(fastln.set_compile_mode, *before)
            if self.name == "override":
                stack.enter_context(fastln.override())
            if self.autocast:
                stack.enter_context(torch.autocast(device.type, self.autocast))
            yield

    def logits(self, x: Tensor) -> Tensor:
        """A step's forward; for inference, all of it."""
        with torch.set_grad_enabled(self.direction == "training"):
            y = self.call(x)
        return getattr(y, "logits", y)

    def steps(self, x: Tensor, count: int) -> None:
        for _ in range(count):
            y = self.logits(x)
            if self.direction == "training":
                y.float().square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)

    def check(self, x: Tensor, stock: Tensor | None, tolerance: float) -> Tensor:
        """The output, once it is near stock's and our ops or kernels have run where they should, and nowhere else."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with self._around(x.device):
            self.logits(x)  # compiles what has to be compiled
            with torch.profiler.profile(activities=activities[: 1 + x.is_cuda]) as profile:
                y = self.logits(x).detach().float().clone()
        ours = any("fastln::" in event.name for event in profile.events())
        if ours != (self.name in ("convert", "override")):
            raise SystemExit(f"{self.name}: ours {'have' if ours else 'have not'} run")
        off = 0.0 if stock is None else ((y - stock).abs().max() / stock.abs().max()).item()
        if not off <= tolerance:
            raise SystemExit(f"{self.name}: off stock's output by {off:.2g} of its largest value")
        return y

    def time(self, x: Tensor, count: int) -> float:
        """Seconds a step."""
        with self._around(x.device):
            if not x.is_cuda:
                begin = time.perf_counter()
                self.steps(x, count)
                return (time.perf_counter() - begin) / count
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            self.steps(x, count)
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / count


def names(engine: str, device: torch.device) -> list[str]:
    """Variants to compare. Override reaches neither into compiled graphs nor to the CPU."""
    if engine != "eager":
        return ["stock", "convert", "convert, inductor"]
    return ["stock", "convert", "override"] if device.type == "cuda" else ["stock", "convert"]


def measure(entry: zoo.Entry, dtype: str, engine: str, direction: str, options: argparse.Namespace) -> list[dict]:
    """One record a variant."""
    parameters, autocast = DTYPES[dtype]
    torch.manual_seed(0)
    torch.compiler.reset()
    model = entry.make(options.size).to(options.device, parameters)
    x = entry.inputs(options.size, options.device, parameters)
    variants = [Variant(name, entry, model, engine, direction, autocast) for name in names(engine, options.device)]
    del model
    stock = None
    for variant in variants:
        y = variant.check(x, stock, TOLERANCE[dtype])
        stock = y if stock is None else stock
    del stock, y
    for variant in variants:
        variant.time(x, 2)
    # Short steps wait for the host, whose times are the ones that scatter: they get more rounds.
    round_seconds = sum(variant.time(x, 2) for variant in variants) * options.steps
    rounds = max(options.rounds, min(int(options.seconds / round_seconds), MOST_ROUNDS))
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for turn in range(rounds):
        for variant in variants[turn % len(variants) :] + variants[: turn % len(variants)]:
            times[variant.name].append(variant.time(x, options.steps))
    return [
        {
            "model": entry.name,
            "dtype": dtype,
            "engine": engine,
            "direction": direction,
            "variant": variant.name,
            "norms": variants[1].norms,
            "rounds": rounds,
            "layers": options.size.depth,
            "width": options.size.width,
            "input": list(x.shape),
            "seconds": statistics.median(times[variant.name]),
            # Round by round beside stock, so that what slows both cancels.
            "over_stock": statistics.median(s / t for s, t in zip(times["stock"], times[variant.name], strict=True)),
            "spread": (max(times[variant.name]) - min(times[variant.name])) / statistics.median(times[variant.name]),
        }
        for variant in variants
    ]


# ------------------------------------------------------------------------------------------- host time


def host_times() -> list[dict]:
    """Host seconds of a call, and of a call with its backward, of F.layer_norm and of each way to us."""
    x = torch.randn(16, 1024, device="cuda", dtype=torch.float16)
    weight, bias = torch.randn(2, 1024, device="cuda", dtype=torch.float16)
    stock, ours = (kind(1024, device="cuda", dtype=torch.float16) for kind in (nn.LayerNorm, fastln.LayerNorm))
    calls = {
        "F.layer_norm": lambda t: F.layer_norm(t, [1024], weight, bias),
        "F.layer_norm under override": lambda t: F.layer_norm(t, [1024], weight, bias),
        "fastln.layer_norm": lambda t: fastln.layer_norm(t, [1024], weight, bias),
        "nn.LayerNorm": stock,
        "nn.LayerNorm under override": stock,
        "fastln.LayerNorm": ours,
    }
    leaf = x.clone().requires_grad_()

    def with_backward(call: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.grad(call(leaf), leaf, x)

    def without_grad(call: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: call(x)

    records = []
    for grad, wrap in ((False, without_grad), (True, with_backward)):
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(5):  # in turns, as with the models
            for name, call in calls.items():
                context = fastln.override() if name.endswith("override") else contextlib.nullcontext()
                with context, torch.set_grad_enabled(grad):
                    times[name].append(_timing.host_time(wrap(call), (), batches=11))
        records += [{"name": name, "grad": grad, "seconds": min(values)} for name, values in times.items()]
    return records


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    on_gpu = options.device.type == "cuda"
    document = {
        "suite": "models",
        "machine": machine.facts() | {"date": datetime.date.today().isoformat()},
        "rounds": options.rounds,
        "steps": options.steps,
        "layers": options.size.depth,
        "width": options.size.width,
        "host": host_times() if on_gpu and not options.no_host else [],
        "models": [],
        "missing": [e.name for e in options.entries if not e.is_installed()],
    }
    for entry in filter(zoo.Entry.is_installed, options.entries):
        for dtype in options.dtypes:
            for engine in options.engines:
                for direction in options.directions:
                    start = time.monotonic()
                    records = measure(entry, dtype, engine, direction, options)
                    document["models"] += records
                    options.results.write_text(json.dumps(document, indent=1) + "\n")
                    told = ", ".join(f"{r['variant']} {r['seconds'] * 1e3:.2f} ms" for r in records)
                    seconds = time.monotonic() - start
                    print(f"{entry.name}, {dtype}, {engine}, {direction}: {told}  ({seconds:.0f} s)", flush=True)
                    if on_gpu:
                        torch.cuda.empty_cache()
    options.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
