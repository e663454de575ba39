"""Times the variants of the forward kernel that can hold a row, less those that leave 40 % of their loads idle or more:
what src/tuning.h is made from.

    python bench/tune.py --out build/tune.json [--shapes 4096x4096,1x8192] [--dtypes float16] [--seconds 300]

For each shape and dtype it prints the variants from the fastest on, as microseconds and as a multiple of
the copy of the same run; ``chosen`` is the one that plan() picks. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import fastln
from fastln import _compare, _norm, _timing

PIECES = (2, 3, 4, 5, 8)  # 16-byte vectors a thread: find_forward() in src/norm_launch.cuh
MOST_THREADS = {4: 768, 8: 1024}  # of a row's block; 512 for other numbers of vectors, and in a cluster

SHAPES = (
    "4096x512,4096x1024,4096x2048,4096x4096,4096x8192,8192x8192,32768x256,32768x768,65536x128,16384x5120,"
    "2048x16384,512x65536,16x4096,128x4096,1x8192"
)


def variants(cols: int, dtype: torch.dtype) -> list[str]:
    """Plans that cover a row with less than 40 % of the loads idle."""
    accesses = -(-cols * dtype.itemsize // 16)
    found = []
    for pieces in PIECES:
        clusters = (1, 2, 4, 8, 16) if pieces == 8 and cols >= 32768 and cols * dtype.itemsize % 16 == 0 else (1,)
        for cluster in clusters:
            threads = group_of(-(-accesses // (pieces * cluster)))
            used = accesses / (pieces * cluster * threads)
            if (
                threads <= (MOST_THREADS.get(pieces, 512) if cluster == 1 else 512)
                and used > 0.6
                and (cluster == 1 or threads >= 64)
                and (threads >= 32 or pieces <= 3)
            ):
                found.append(f"pieces={pieces},threads={threads},cluster={cluster}")
    return found


def group_of(wanted: int) -> int:
    """A power of two within a warp, whole warps beyond."""
    return -(-wanted // 32) * 32 if wanted > 32 else 1 << (wanted - 1).bit_length()


def name_of(plan: str) -> str:
    return plan.replace("pieces=", "p").replace(",threads=", " t").replace(",cluster=1", "")


def tune(rows: int, cols: int, dtype: torch.dtype) -> dict:
    """Seconds of each variant, of the copy and of ``F.layer_norm``, on one shape."""
    device = torch.device("cuda")
    inputs = _timing.random_inputs(rows, cols, dtype, device)
    weight, bias = _compare.random_affine(cols, dtype, device)
    rotation = [(x, (cols,), weight, bias) for x in inputs]
    seconds = {}
    for plan in variants(cols, dtype):
        _norm.force_plan(plan)
        seconds[name_of(plan)] = _timing.time_call(fastln.layer_norm, rotation)
    _norm.force_plan("")
    seconds["chosen"] = _timing.time_call(fastln.layer_norm, rotation)
    return {
        "rows": rows,
        "cols": cols,
        "dtype": str(dtype).removeprefix("torch."),
        "plan": str(fastln.plan(cols, dtype)),
        "copy": _timing.time_call(lambda x, *_: torch.empty_like(x).copy_(x), rotation),
        "layer_norm": _timing.time_call(F.layer_norm, rotation),
        "variants": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--dtypes", default="float16")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    options = parser.parse_args()
    stop = time.monotonic() + options.seconds
    results = []
    with torch.no_grad():
        for dtype in options.dtypes.split(","):
            for shape in options.shapes.split(","):
                if time.monotonic() > stop:
                    break
                rows, cols = map(int, shape.split("x"))
                result = tune(rows, cols, getattr(torch, dtype))
                results.append(result)
                options.out.write_text(json.dumps(results, indent=1))
                best = sorted(result["variants"].items(), key=lambda item: item[1])
                print(
                    f"{dtype} {shape}: copy {result['copy'] * 1e6:.2f} F {result['layer_norm'] * 1e6:.2f} |",
                    ", ".join(f"{name} {s * 1e6:.2f} ({s / result['copy']:.2f})" for name, s in best[:7]),
                    flush=True,
                )


if __name__ == "__main__":
    main()
