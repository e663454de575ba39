"""The cells of the layer_norm benchmarks, forward and backward: rows, columns and dtypes, and why each is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import contenders
import torch

F16, BF16, F32 = DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Cell:
    """One input. ``groups`` says what it is there for; norm_table.py and bwd_table.py have a table for each group."""

    rows: int
    cols: int
    dtype: torch.dtype
    groups: tuple[str, ...]
    #: Of a backward: that neither dweight nor dbias is asked for.
    dx_alone: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def id(self) -> str:
        return f"{self.rows}x{self.cols}-{self.dtype_name}"


#: The shapes that have a target in float16, and those that have one in the two other dtypes too.
SHAPES = (*contenders.SHAPES, (32768, 768), (16384, 5120), (2048, 16384), (512, 65536))
TARGETS_IN_ALL_DTYPES = {(4096, 4096), (32768, 768), (4096, 512), (4096, 1024), (32768, 256)}

#: Columns of the sweeps: powers of two, hidden sizes of models, and lengths that fit no vector or tile.
SWEEP_COLS = sorted(
    {100, 257, 300, 384, 640, 760, 1152, 1280, 1600, 2560, 3072, 5120, 6144, 7168, 12288, 20480, 131072, 262144}
    | {2**i for i in range(7, 17)}
)
BACKWARD_SWEEP_COLS = sorted({64, 320, 768, 769, 4097, *SWEEP_COLS} - {760})
#: Inputs of the sweeps hold at most this: as many rows, a power of two, as fit. With the output that is past L2.
SWEEP_BYTES = 128 << 20

FEW_ROWS = (1, 2, 4, 8, 16, 32, 64)
BACKWARD_ROWS = (*FEW_ROWS, 256, 1024)
MANY_ROWS = (1 << 20, 64)
#: Of the backward: more rows than a handful, too few to fill the GPU, as in fine-tuning and small batches.
BATCHES = [((rows, 768), F16) for rows in (256, 512, 1024, 2048)]
BATCHES += [((rows, 1024), dtype) for rows in (512, 1024, 2048) for dtype in (F16, F32)]
BATCHES += [(shape, F16) for shape in ((1024, 2048), (512, 4096), (256, 8192), (64, 16384), (1024, 769))]

#: An odd row length beside its even neighbour, which the target cells hold.
ODD_SHAPES = ((32768, 257), (32768, 769), (4096, 1025), (4096, 4097), (4096, 8193))

Wanted = tuple[tuple[int, int], torch.dtype, str]  # shape, dtype, and the group that wants it


def group_of(shape: tuple[int, int], dtype: torch.dtype) -> str:
    return "target" if dtype == F16 or shape in TARGETS_IN_ALL_DTYPES else "dtypes"


def shapes_with_group() -> list[Wanted]:
    """SHAPES in every dtype; those with a target first."""
    found = [(shape, dtype, group_of(shape, dtype)) for dtype in DTYPES for shape in SHAPES]
    return sorted(found, key=lambda wanted: wanted[2] != "target")


def sweep(columns: Iterable[int]) -> list[Wanted]:
    return [(sweep_shape(cols, dtype), dtype, "sweep") for dtype in DTYPES for cols in columns]


def sweep_shape(cols: int, dtype: torch.dtype) -> tuple[int, int]:
    fitting = SWEEP_BYTES // (cols * dtype.itemsize)
    return 1 << (fitting.bit_length() - 1), cols


def each_once(wanted: Iterable[Wanted]) -> list[Cell]:
    """Every input once, with all its groups."""
    groups: dict[tuple, tuple[str, ...]] = {}
    for shape, dtype, name in wanted:
        groups[shape, dtype] = (*groups.get((shape, dtype), ()), name)
    return [Cell(*shape, dtype, names) for (shape, dtype), names in groups.items()]


def forward_cells() -> list[Cell]:
    wanted = shapes_with_group() + sweep(SWEEP_COLS)
    wanted += [((rows, 4096), F16, "few rows") for rows in FEW_ROWS]
    wanted += [(shape, F16, "odd") for shape in ODD_SHAPES]
    return each_once(wanted)


def backward_cells() -> list[Cell]:
    """Behind each cell that has a target stands dx alone, over the same inputs."""
    wanted = [w for w in shapes_with_group() if w[2] == "target"] + sweep(BACKWARD_SWEEP_COLS)
    wanted += [((rows, 4096), F16, "rows") for rows in BACKWARD_ROWS]
    wanted += [(MANY_ROWS, dtype, "rows") for dtype in DTYPES]
    wanted += [(*batch, "batch") for batch in BATCHES]
    cells = []
    for cell in each_once(wanted):
        cells.append(cell)
        if "target" in cell.groups:
            cells.append(dataclasses.replace(cell, groups=("dx",), dx_alone=True))
    return cells


CELLS = forward_cells()
BACKWARD_CELLS = backward_cells()
