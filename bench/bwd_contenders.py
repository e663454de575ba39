"""Who runs in the benchmark of the backward, in which cells, and what counts as right.

Every contender is the backward alone, called with what a forward has saved: ``call(dy, x, mean, rstd, weight,
bias)`` gives ``(dx, dweight, dbias)``, with None for what the cell does not ask for.
"""

from __future__ import annotations

import functools
import math

import norm_contenders
import torch
from cell_results import THEIRS
from lineup import Lineup
from norm_cells import Cell

from fastln import _compare, _timing

OURS = "fastln.layer_norm_bwd"
FLOOR = "torch.add"

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

#: What dweight and dbias may be off by for each root of a row summed, beside the roundoff of their dtype: the
#: sums are of standard normal size and kept in float32.
SUM_TOLERANCE = 3e-5

#: Elements of a float64 reference that are computed at once, so that it needs little memory.
_CHUNK = 1 << 22


@functools.lru_cache(maxsize=1)  # the tests run shape by shape, so one is enough
def workload(shape: tuple[int, int], dtype: torch.dtype) -> list[_timing.Arguments]:
    """Arguments of the calls: x and dy each enough to be cold, statistics of each x, one weight and bias."""
    rows, cols = shape
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    inputs, grads = (_timing.random_inputs(rows, cols, dtype, device) for _ in range(2))
    weight, bias = _compare.random_affine(cols, dtype, device)
    rotation = []
    for x, dy in zip(inputs, grads, strict=False):  # where memory is short, there may be fewer of the second
        _, mean, rstd = torch.native_layer_norm(x, (cols,), None, None, _compare.EPS)
        rotation.append((dy, x, mean, rstd, weight, bias))
    return rotation


# ----------------------------------------------------------------------------------------- contenders


def asked_for(cell: Cell) -> list[bool]:
    """The ``output_mask``."""
    return [True, not cell.dx_alone, not cell.dx_alone]


def make_floor(cell: Cell):
    def add(dy, x, mean, rstd, weight, bias) -> Gradients:
        """Two tensors read and one written: no backward can move less."""
        return torch.add(x, dy, out=torch.empty_like(x)), None, None

    return add


def make_of(op, cell: Cell):
    """An op with the arguments of aten's ``native_layer_norm_backward``, asked for what the cell wants."""
    mask = asked_for(cell)

    def backward(dy, x, mean, rstd, weight, bias) -> Gradients:
        return op(dy, x, x.shape[-1:], mean, rstd, weight, bias, mask)

    return backward


def make_theirs(cell: Cell):
    """What autograd runs for ``F.layer_norm``."""
    return make_of(torch.ops.aten.native_layer_norm_backward, cell)


def make_compiled(cell: Cell):
    """The graph that ``torch.compile`` of a training step has for it: Inductor decomposes aten's op and fuses it."""
    torch._dynamo.reset()
    return torch.compile(make_theirs(cell), dynamic=False, fullgraph=True)


def make_liger(cell: Cell):
    """Liger's, a Triton kernel; ImportError where liger-kernel is not installed."""
    backward = norm_contenders.load_liger().layer_norm_backward
    asked = {"needs_dw": False, "needs_db": False} if cell.dx_alone else {}

    def liger(dy, x, mean, rstd, weight, bias) -> Gradients:
        return backward(dy, x, weight, bias, mean, rstd, **asked)

    return liger


def make_ours(cell: Cell):
    return make_of(torch.ops.fastln.layer_norm_bwd, cell)


LINEUP = Lineup(
    suite="backward",
    factories={
        FLOOR: make_floor,
        THEIRS: make_theirs,
        "torch.compile": make_compiled,
        "Liger": make_liger,
        OURS: make_ours,
    },
    peers=dict.fromkeys(("torch.compile", "Liger"), lambda cell: bool({"target", "batch"} & set(cell.groups))),
    rotation=lambda cell: workload(cell.shape, cell.dtype),
)


# --------------------------------------------------------------------------------------------- bytes


def bytes_moved(name: str, cell: Cell) -> int:
    """The fewest bytes that the call moves: x and dy in, dx out, and what is small beside them once each."""
    numel, itemsize = cell.rows * cell.cols, cell.dtype.itemsize
    if name == FLOOR:
        return 3 * numel * itemsize
    statistics = 2 * cell.rows * torch.float32.itemsize
    parameters = 1 if cell.dx_alone else 3  # weight, dweight, dbias
    return (3 * numel + parameters * cell.cols) * itemsize + statistics


# -------------------------------------------------------------------------------------------- values


def verify(name: str, cell: Cell, found: Gradients, arguments: _timing.Arguments) -> dict[str, float]:
    """The largest error of each gradient in ``found``; raises if one is more than it may be, or is no such gradient."""
    dy, x, _, _, weight, bias = arguments
    if name == FLOOR:
        assert torch.equal(found[0], x + dy), "a sum written into a tensor differs from the sum"
        return {"dx": 0.0}
    check_kinds(name, cell, found, (x, weight, bias))
    dx, dweight, dbias = found
    sums = torch.zeros(2, cell.cols, dtype=torch.float64, device=x.device)
    errors = {"dx": 0.0}
    step = max(1, _CHUNK // cell.cols)
    for first in range(0, x.shape[0], step):
        rows = slice(first, first + step)
        reference, *row_sums = backward_float64(dy[rows], x[rows], weight)
        errors["dx"] = max(errors["dx"], worst(name, "dx", dx[rows], reference, 1.0))
        sums += torch.stack(row_sums)
    if not cell.dx_alone:
        scale = SUM_TOLERANCE / norm_contenders.TOLERANCE[cell.dtype] * math.sqrt(x.shape[0])
        errors["dweight"] = worst(name, "dweight", dweight, sums[0], scale)
        errors["dbias"] = worst(name, "dbias", dbias, sums[1], scale)
    return errors


def check_kinds(name: str, cell: Cell, found: Gradients, like: tuple[torch.Tensor, ...]) -> None:
    """Each gradient asked for has shape and dtype of what it is the gradient of; the others are None."""
    for what, grad, of, asked in zip(("dx", "dweight", "dbias"), found, like, asked_for(cell), strict=True):
        expected = (of.dtype, of.shape) if asked else None
        got = None if grad is None else (grad.dtype, grad.shape)
        assert got == expected, f"{name} gave {what} as {got}, expected {expected}"


def worst(name: str, what: str, found: torch.Tensor, reference: torch.Tensor, scale: float) -> float:
    """The largest error, if none is more than the dtype's tolerance times (scale + |reference|)."""
    error = (found.double() - reference).abs()
    # Written so that NaN is wrong.
    right = bool((error <= norm_contenders.TOLERANCE[found.dtype] * (scale + reference.abs())).all())
    assert right, f"{what} of {name} is off by up to {float(error.max()):.3g} from float64"
    return float(error.max())


def backward_float64(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dx ``[rows, cols]``, dweight and dbias ``[cols]``, from the formula alone: no saved statistics."""
    dy, x, weight = dy.double(), x.double(), weight.double()
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + _compare.EPS).rsqrt()
    xhat = centred * rstd
    g = dy * weight
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx, (dy * xhat).sum(0), dy.sum(0)
