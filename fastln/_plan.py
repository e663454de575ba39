"""Which kernel variant a row gets: ``fastln.plan``, and the way to force another one."""

from __future__ import annotations

import ctypes
import operator
import os
from dataclasses import dataclass

import torch

from fastln._library import library
from fastln._norm_fakes import FLOATING
from fastln._refuse import dtype_name


@dataclass(frozen=True)
class Plan:
    """The kernel variant that rows of one length and dtype get on a GPU.

    Attributes:
        pieces: Pieces of 16 bytes that a thread holds in registers; 0 if the row is cut into chunks instead, over
            three launches.
        threads: Threads of a row within a block; up to 32, several rows share a block.
        cluster: Blocks that share a row through distributed shared memory.
    """

    pieces: int
    threads: int
    cluster: int


def plan(
    cols: int,
    dtype: torch.dtype = torch.float16,
    clusters: bool = True,
    wide_blocks: bool = True,
    wide_clusters: bool = True,
) -> Plan:
    """The variant that ``layer_norm`` picks for rows of ``cols`` elements.

    It depends on nothing else, so a row's result is the same in every batch.

    Args:
        cols: Product of ``normalized_shape``, at least 1.
        dtype: dtype of the input.
        clusters: Whether the GPU has thread block clusters (compute capability 9.0 and later).
        wide_blocks: Whether it runs blocks of 1024 threads for long rows (compute capability before 10.0).
        wide_clusters: Whether its clusters may have 16 blocks, as they may on an H200; on a part of a GPU, or on one
            with fewer than 16 multiprocessors side by side, they have at most 8.

    Raises:
        ValueError: ``cols`` is no int, less than 1, or so large that the row's bytes are past 2^63, or ``dtype`` is
            none that ``layer_norm`` takes.
    """
    if dtype not in FLOATING:
        raise ValueError(f"fastln.plan: expected float16, bfloat16, float32 or float64, got {dtype_name(dtype)}")
    try:
        cols = operator.index(cols)
    except TypeError:
        raise ValueError(f"fastln.plan: expected cols to be an int, got {type(cols).__name__}") from None
    most = (2**63 - 1) // dtype.itemsize
    if not 1 <= cols <= most:
        bound = "at least 1" if cols < 1 else f"at most {most}"
        raise ValueError(f"fastln.plan: expected cols of {bound}, got {cols}")
    values = (ctypes.c_int32 * 3)()
    max_cluster = 1 if not clusters else 16 if wide_clusters else 8
    library.fastln_plan(ctypes.c_int64(cols), dtype.itemsize, max_cluster, wide_blocks, values)
    return Plan(*values)


def force_plan(text: str) -> None:
    """Makes ``layer_norm`` use one variant wherever it can hold the row; for tests and for tuning.

    The environment variable ``FASTLN_PLAN`` does the same from the start of the process.

    Args:
        text: ``"pieces=4,threads=128"``, optionally with ``cluster=2``; ``"split"`` for the row in chunks; or
            ``""`` for none.

    Raises:
        ValueError: The text is none of these.
    """
    if text in ("", "split"):
        library.fastln_force_plan(-1 if text == "" else 0, 0, 1)
        return
    try:
        values = {"cluster": 1} | {key: int(value) for key, value in (part.split("=") for part in text.split(","))}
        runnable = _runnable(**values)
    except (ValueError, TypeError):
        runnable = False
    if not runnable:
        raise ValueError(f'fastln: expected a plan like "pieces=4,threads=128", got "{text}"')
    library.fastln_force_plan(values["pieces"], values["threads"], values["cluster"])


def _runnable(pieces: int, threads: int, cluster: int) -> bool:
    most = {4: 768, 8: 1024}.get(pieces, 512) if cluster == 1 else 512
    whole_warps = threads % 32 == 0 and 32 <= threads <= most
    if cluster > 1:
        return cluster in (2, 4, 8, 16) and pieces == 8 and whole_warps
    if threads in (1, 2, 4, 8, 16):
        return cluster == 1 and pieces in (2, 3)
    return cluster == 1 and pieces in (2, 3, 4, 5, 8) and whole_warps


force_plan(os.environ.get("FASTLN_PLAN", ""))
