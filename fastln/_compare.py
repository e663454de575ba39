"""What the report and the benchmark compare: the contenders, the float64 reference, what counts as right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

EPS = 1e-5

#: An output may differ from the reference by this much of (1 + |reference|). Key: element type, accumulate
#: type. The roundoff of float16 is 5e-4: one or two of them in the output, or several in every sum too.
TOLERANCE = {
    (torch.float32, "float32"): 1e-5,
    (torch.float16, "float32"): 2e-3,
    (torch.float16, "float16"): 2e-2,
}
#: ``naive`` rounds after every step, and its variance is off by 1 / (2 * cols).
NAIVE_TOLERANCE = 2e-2

#: Elements of a float64 reference that are computed at once, so that it needs little memory.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Contender:
    """One way to compute the layer norm of ``x`` [rows, cols]: ``call(x, weight, bias)``."""

    name: str
    dtype: torch.dtype
    accumulate: str
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    #: How far from the reference its outputs may be, over (1 + |reference|).
    tolerance: float
    #: Whether it promises the value of the formula. ``naive`` does not: it has another variance, no eps.
    exact: bool = True


def baseline(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What everything is measured against: torch's own ``F.layer_norm`` over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def naive(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Mean and standard deviation written out, as tutorials do: ``std`` is unbiased and there is no eps."""
    mean = x.mean(dim=-1, keepdim=True)
    return (x - mean) / x.std(dim=-1, keepdim=True) * weight + bias


def contenders(kernels: Iterable, dtype: torch.dtype) -> list[Contender]:
    """``F.layer_norm`` first, then ``naive``, then those of ``kernels`` whose element type is ``dtype``."""
    exact = TOLERANCE[dtype, "float32"]
    return [
        Contender("F.layer_norm", dtype, "float32", baseline, exact),
        Contender("naive", dtype, "float32", naive, NAIVE_TOLERANCE, exact=False),
    ] + [
        Contender(f"layer_norm_{k.name}", dtype, k.accumulate, k.op, TOLERANCE[dtype, k.accumulate])
        for k in kernels
        if k.dtype == dtype
    ]


def random_affine(cols: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weight in [0.5, 1.5] and bias in [-0.5, 0.5], each ``[cols]``."""
    weight, bias = torch.rand(2, cols, device=device)
    return (weight + 0.5).to(dtype), (bias - 0.5).to(dtype)


def bytes_moved(x: torch.Tensor) -> int:
    """The fewest bytes that a layer norm of ``x`` moves: x in, y out, weight and bias once."""
    return (2 * x.numel() + 2 * x.shape[-1]) * x.element_size()


@dataclass
class Check:
    """How an output compares with the reference."""

    #: Largest ``|output - reference|``.
    error: float
    #: No element is off by more than the tolerance, rows that must overflow not counted.
    right: bool
    #: Rows in which a sum of squares comes near what float16 holds, and the contender sums in float16.
    overflowing_rows: int
    #: The part of the outputs that equal ``bias`` exactly.
    equal_to_bias: float


def check(contender: Contender, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Check:
    """Hold ``contender``'s ``y`` against a two-pass float64 layer norm of ``x``, ``weight``, ``bias`` as they are."""
    if (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
        raise RuntimeError(f"{contender.name} returned {y.dtype}{list(y.shape)} for {x.dtype}{list(x.shape)}")
    result = Check(error=0.0, right=True, overflowing_rows=0, equal_to_bias=0.0)
    errors, equal = [torch.zeros((), dtype=torch.float64, device=x.device)], 0
    step = max(1, _CHUNK // x.shape[-1])
    for first in range(0, x.shape[0], step):
        rows = slice(first, first + step)
        reference, squares = layer_norm_float64(x[rows], weight, bias)
        error = (y[rows].double() - reference).abs()
        errors.append(error.max())  # NaN, where there is one
        judged = torch.ones_like(squares, dtype=torch.bool)
        if contender.accumulate == "float16":
            judged = squares < torch.finfo(torch.float16).max / 2
        wrong = ~(error <= contender.tolerance * (1 + reference.abs()))  # written so that NaN is wrong
        result.right &= not bool((wrong & judged).any())
        result.overflowing_rows += int((~judged).sum())
        equal += int((y[rows] == bias).sum())
    result.error = float(torch.stack(errors).max())
    result.equal_to_bias = equal / y.numel()
    return result


def layer_norm_float64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64, and the sum of centred squares of each row ``[rows, 1]``."""
    centred = x.double() - x.double().mean(-1, keepdim=True)
    squares = centred.square().sum(-1, keepdim=True)
    rstd = (squares / x.shape[-1] + EPS).rsqrt()
    return centred * rstd * weight.double() + bias.double(), squares
