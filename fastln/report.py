"""The report of ``python -m fastln``: are the kernels right on this machine, and how fast are they?

It prints what is installed, a table for each shape and dtype, and the overflow table, which shows what
becomes of the float16-accumulating kernels when a sum of squares passes 65504.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

import fastln
from fastln import _compare, _timing
from fastln._compare import Contender

#: The shapes (rows, cols) of the tutorial (LeetCUDA) that the names of the kernels come from.
SHAPES = ((4096, 512), (4096, 1024), (4096, 2048), (4096, 4096), (4096, 8192), (8192, 8192))
OVERFLOW_SHAPE = (4096, 512)
OVERFLOW_SCALE = 100
#: A CPU gets this fraction of the rows, so that the report takes seconds there.
CPU_FRACTION = 32

DTYPES = {"float32": [torch.float32], "float16": [torch.float16], "all": [torch.float32, torch.float16]}
SEED = 0


def main(argv: Sequence[str] | None = None, kernels: Iterable | None = None) -> int:
    """Print the report; the exit status is 1 if a value is wrong. ``kernels`` default to ``fastln.KERNELS``."""
    options = parse(argv)
    kernels = list(fastln.KERNELS if kernels is None else kernels)
    document = {"versions": versions(), "device": device_facts(options.device)}
    try:
        with torch.no_grad():
            document |= run(options, kernels, document)
    except RuntimeError as error:  # an op refused the device, or the memory is too small
        print(f"\npython -m fastln: stopped: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(_finite(document), indent=2, allow_nan=False) + "\n")
    return 1 if document["wrong"] else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fastln",
        description="Check the eight layer norm kernels against float64, time each beside F.layer_norm, and "
        "show which of them survive large values. The exit status is 1 if a value is wrong.",
    )
    parser.add_argument(
        "--shapes",
        type=_shapes,
        metavar="ROWSxCOLS,...",
        help="shapes to run, as in 4096x512,1x8192 (default: six shapes from 4096x512 to 8192x8192; on a CPU "
        f"1/{CPU_FRACTION} of those rows)",
    )
    parser.add_argument(
        "--device",
        type=_device,
        metavar="DEVICE",
        help="cpu, cuda or cuda:INDEX (default: cuda if there is a GPU, else cpu)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="all", help="element type of the kernels to run (default: all)"
    )
    parser.add_argument("--json", type=_writable, metavar="FILE", help="also write every figure to FILE, in SI units")
    options = parser.parse_args(argv)
    if options.device is None:
        options.device = _device("cuda" if torch.cuda.is_available() else "cpu")
    options.reduced = options.shapes is None and options.device.type == "cpu"
    if options.shapes is None:
        fraction = CPU_FRACTION if options.reduced else 1
        options.shapes = [(rows // fraction, cols) for rows, cols in SHAPES]
    return options


def run(options: argparse.Namespace, kernels: list, document: dict) -> dict:
    """Measure and print as it goes; returns the results for the JSON document."""
    torch.manual_seed(SEED)
    print_header(document, options)
    groups = [
        (shape, dtype, _compare.contenders(kernels, dtype))
        for shape in options.shapes
        for dtype in DTYPES[options.dtype]
    ]
    overflows = torch.float16 in DTYPES[options.dtype]
    progress = Progress(sum(len(group) for _, _, group in groups) + overflows)
    results = []
    for shape, dtype, group in groups:
        records = measure(group, shape, dtype, options.device, progress)
        progress.clear()
        print_results(records)
        results += records
    overflow = []
    if overflows:
        progress.step("overflow table")
        rows, cols = OVERFLOW_SHAPE
        rows //= CPU_FRACTION if options.device.type == "cpu" else 1
        overflow = measure_overflow(_compare.contenders(kernels, torch.float16), (rows, cols), options.device)
        progress.clear()
        print_overflow(overflow)
    wrong = [r for r in results + overflow if r["verdict"] == "WRONG"]
    print_verdict(wrong)
    return {
        "timing": _timing.describe(options.device),
        "results": results,
        "overflow": overflow,
        "wrong": [r["name"] for r in wrong],
    }


# ---------------------------------------------------------------------------------------- measuring


def measure(
    group: list[Contender],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> list[dict]:
    """One record a contender: its largest error, its time, and that beside the first one's."""
    inputs = _timing.random_inputs(*shape, dtype, device)
    weight, bias = _compare.random_affine(shape[1], dtype, device)
    records: list[dict] = []
    for contender in group:
        progress.step(f"{shape[0]}x{shape[1]} {_name(dtype)}", contender.name)
        output = contender.call(inputs[0], weight, bias)
        check = _compare.check(contender, output, inputs[0], weight, bias)
        del output
        seconds = _timing.time_call(contender.call, [(x, weight, bias) for x in inputs])
        verdict = "right" if check.right else "WRONG"
        if not contender.exact:
            verdict = "approximate"
        elif check.overflowing_rows and check.right:
            verdict = "overflows"
        records.append(
            {
                "name": contender.name,
                "shape": list(shape),
                "dtype": _name(dtype),
                "accumulate": contender.accumulate,
                "max_error": check.error,
                "seconds": seconds,
                "bytes": _compare.bytes_moved(inputs[0]),
                "bytes_per_second": _compare.bytes_moved(inputs[0]) / seconds,
                "speedup": records[0]["seconds"] / seconds if records else 1.0,
                "verdict": verdict,
            }
        )
    return records


def measure_overflow(group: list[Contender], shape: tuple[int, int], device: torch.device) -> list[dict]:
    """What each float16 contender makes of ``OVERFLOW_SCALE * randn``.

    A kernel that accumulates in float16 has to return ``bias`` everywhere, any other the right values.
    """
    x = (OVERFLOW_SCALE * torch.randn(shape, device=device)).to(torch.float16)
    weight, bias = _compare.random_affine(shape[1], torch.float16, device)
    _, squares = _compare.layer_norm_float64(x, weight, bias)
    records = []
    for contender in group:
        if not contender.exact:
            continue
        check = _compare.check(contender, contender.call(x, weight, bias), x, weight, bias)
        if check.overflowing_rows:
            verdict = "overflows" if check.equal_to_bias == 1 else "WRONG"
        else:
            verdict = "right" if check.right else "WRONG"
        records.append(
            {
                "name": contender.name,
                "shape": list(shape),
                "dtype": "float16",
                "accumulate": contender.accumulate,
                "smallest_sum_of_squares": float(squares.min()),
                "max_error": check.error,
                "equal_to_bias": check.equal_to_bias,
                "verdict": verdict,
            }
        )
    return records


def versions() -> dict:
    """What is installed, and what it was built with."""
    return {
        "fastln": fastln.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "build": fastln.build_info(),
    }


def device_facts(device: torch.device) -> dict:
    """The device by name, and what of it sets the speed of a layer norm."""
    if device.type == "cpu":
        return {"type": "cpu", "name": platform.machine(), "threads": torch.get_num_threads()}
    facts = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "index": device.index,
        "name": facts.name,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "l2_bytes": facts.L2_cache_size,
        "memory_bytes": facts.total_memory,
    }


# ----------------------------------------------------------------------------------------- printing

_COLUMNS = "{:<27} {:<11} {:>9} {:>11} {:>8} {:>9}   {}"


def print_header(document: dict, options: argparse.Namespace) -> None:
    v, d = document["versions"], document["device"]
    build = v["build"]
    if d["type"] == "cuda":
        device = (
            f"{d['name']}, compute capability {d['compute_capability']}, {d['multiprocessors']} SMs, "
            f"{d['l2_bytes'] / 2**20:.0f} MB L2"
        )
    else:
        device = f"CPU ({d['name']}), {d['threads']} threads"
    ptx = "".join(f", and PTX for {arch} and later" for arch in build["ptx"])
    print(f"fastln {v['fastln']}: layer norm kernels beside torch's F.layer_norm\n")
    print(f"  device    {device}")
    print(f"  running   torch {v['torch']}, Python {v['python']}")
    print(
        f"  built     with nvcc {build['nvcc']} and torch {build['torch_built']}, "
        f"for torch {build['torch_target']} and later"
    )
    print(f"  archs     {' '.join(build['archs'])}{ptx}")
    print("\nHow to read the tables")
    for word, meaning in legend(options.device).items():
        print(textwrap.fill(f"{word:<9} {meaning}", 98, initial_indent="  ", subsequent_indent=" " * 12))
    if options.reduced:
        print(f"\nOn a CPU the shapes have 1/{CPU_FRACTION} of their usual rows. --shapes runs others.")
    sys.stdout.flush()


def legend(device: torch.device) -> dict[str, str]:
    return {
        "op": "layer_norm_f32 is torch.ops.fastln.layer_norm_f32, and so on; naive is (x - mean) / std * weight "
        "+ bias in torch, with an unbiased std and no eps",
        "error": "largest |output - reference|; the reference is two-pass float64 on the same inputs",
        "us": _timing.describe(device),
        "GB/s": "bytes of input, output, weight and bias over that time",
        "speed-up": "time of F.layer_norm of the same dtype over this time",
        "values": "right: all within what the two types allow; overflows: right except in rows whose squares "
        "sum to more than float16 holds; approximate: not meant to equal the reference",
    }


def print_results(records: list[dict]) -> None:
    rows, cols = records[0]["shape"]
    print(f"\n{rows} x {cols}, {records[0]['dtype']}  ({records[0]['bytes'] / 1e6:.4g} MB moved)")
    print("  " + _COLUMNS.format("op", "accumulates", "error", "us", "GB/s", "speed-up", "values"))
    for r in records:
        print(
            "  "
            + _COLUMNS.format(
                r["name"],
                r["accumulate"],
                f"{r['max_error']:.1e}",
                _microseconds(r["seconds"]),
                _figures(r["bytes_per_second"] / 1e9),
                f"{r['speedup']:.2f}x" if r["speedup"] >= 0.1 else f"{r['speedup']:.1g}x",
                r["verdict"],
            ).rstrip()
        )
    sys.stdout.flush()


def print_overflow(records: list[dict]) -> None:
    rows, cols = records[0]["shape"]
    layout = "  {:<27} {:<11} {:>9} {:>9}   {}"
    said = {"overflows": "breaks: every output is its bias", "right": "survives"}
    print(f"\nOverflow: x = {OVERFLOW_SCALE} * randn, {rows} x {cols}, float16")
    smallest = records[0]["smallest_sum_of_squares"]
    print(f"  A row's sum of squares is {smallest:,.0f} or more, and float16 ends at 65,504: a kernel that sums in")
    print("  float16 gets inf, so rstd is 0 and only bias is left.")
    print("  = bias: the part of the outputs that equal their bias exactly.")
    print(layout.format("op", "accumulates", "error", "= bias", "values"))
    for r in records:
        print(
            layout.format(
                r["name"],
                r["accumulate"],
                f"{r['max_error']:.1e}",
                f"{r['equal_to_bias']:.1%}",
                said.get(r["verdict"], r["verdict"]),
            )
        )


def print_verdict(wrong: list[dict]) -> None:
    if not wrong:
        print("\nEvery value is as it should be.")
        return
    sys.stdout.flush()
    print("\npython -m fastln: WRONG VALUES:", file=sys.stderr)
    for r in wrong:
        print(
            f"  {r['name']} at {r['shape'][0]}x{r['shape'][1]}: largest error {r['max_error']:.3g}",
            file=sys.stderr,
        )


class Progress:
    """A count on stderr: on a terminal one line that is rewritten, elsewhere a line for each group."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.group = total, 0, ""
        self.terminal = sys.stderr.isatty()

    def step(self, group: str, item: str = "") -> None:
        """Say that ``item`` of ``group`` is being worked on."""
        self.done += 1
        line = f"[{self.done:>3}/{self.total}] {group}"
        if self.terminal:
            print(f"\r{line} {item}\033[K", end="", file=sys.stderr, flush=True)
        elif group != self.group:
            print(line, file=sys.stderr, flush=True)
        self.group = group

    def clear(self) -> None:
        """Leave the line empty for what is printed next."""
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def _figures(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finite(value: object) -> object:
    """The same document with None where a number is infinite or NaN, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------ option values


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        numbers = part.strip().lower().split("x")
        if len(numbers) != 2 or not all(n.isascii() and n.isdigit() and int(n) > 0 for n in numbers):
            raise argparse.ArgumentTypeError(
                f"expected ROWSxCOLS[,ROWSxCOLS...] with numbers from 1 on, as in 4096x512,1x8192, got {text!r}"
            )
        shapes.append((int(numbers[0]), int(numbers[1])))
    return shapes


def _device(text: str) -> torch.device:
    kind, colon, index = text.partition(":")
    if text == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or (colon and not (index.isascii() and index.isdigit())):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:INDEX, got {text!r}")
    if not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"torch {torch.__version__} finds no GPU here, got {text!r}")
    count = torch.cuda.device_count()
    if colon and int(index) >= count:
        raise argparse.ArgumentTypeError(f"expected an index below {count}, the number of GPUs, got {text!r}")
    return torch.device("cuda", int(index) if colon else torch.cuda.current_device())


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}")
    return path
