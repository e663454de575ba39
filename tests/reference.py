"""What every kernel is held against: a float64 reference, one tolerance table, and the sample inputs.

Nothing here calls fastln; a kernel is only asked for its element and accumulate types.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

EPS = 1e-5

# The column counts where kernels go wrong: 1, around the widths of an access, a warp and a block,
# no multiple of 8 or of 2, and past what one block holds in registers.
COLS = (1, 2, 3, 7, 8, 31, 33, 64, 100, 255, 256, 320, 512, 760, 769, 1000, 1024, 1025)
COLS += (2048, 4096, 8192, 8193, 16384)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """An error is allowed up to

        ulps · ulp(y) + scale · ((1 + |x̂|)·|weight| + |bias|) + mean · (|mean|/sigma)·|weight|

    where x̂ = (y - bias) / weight is the normalised row, whose variance is 1, ulp(y) the spacing of the
    element type at the reference and sigma = 1/rstd. The first term is the rounding of the output, the
    second that of the arithmetic, the third the part of the mean's rounding that x - mean lays bare.
    """

    ulps: float
    scale: float
    mean: float


_HALF = 2.0**-11  # unit roundoff of float16
_SINGLE = 2.0**-24  # unit roundoff of float32
_DOUBLE = 2.0**-53  # unit roundoff of float64

# Keyed by (element dtype, accumulate dtype).
TOLERANCES = {
    # 1e-5 is what is asked of float32: absolute and relative at once, because x̂ counts beside 1. A tail
    # element missed at 16384 columns moves the mean by 6e-5. The mean's rounding is a few units of 2^-24.
    (torch.float32, torch.float32): Tolerance(ulps=0, scale=1e-5, mean=8 * _SINGLE),
    # The row is right to float32 before it is rounded to half, so one rounding to nearest (half an ulp)
    # and one for a fused or unfused last step: 2 ulp. `scale` is left for outputs near 0, where weight·x̂
    # and bias cancel and the spacing of half drops below float32's error.
    (torch.float16, torch.float32): Tolerance(ulps=2, scale=8 * _SINGLE, mean=8 * _SINGLE),
    # Every step rounds to half. A sum is a tree: each of up to 16384 elements passes through at most 16
    # additions in a thread of a 1024-thread block and 10 in the two shuffle stages. Roundings to nearest
    # along these 26 steps add up like a random walk, √26 · 2^-11/√3 ≈ 3 units of 2^-11, and those of the
    # early steps average out over the branches. The variance's error is halved by the square root;
    # division, rsqrt, multiplication and the conversion of weight and bias add half a unit each. So 4
    # units; the eight kernels on a CPU reach half of what this allows.
    (torch.float16, torch.float16): Tolerance(ulps=1, scale=4 * _HALF, mean=4 * _HALF),
    # As float16 that accumulates in float32, for the same reasons.
    (torch.bfloat16, torch.float32): Tolerance(ulps=2, scale=8 * _SINGLE, mean=8 * _SINGLE),
    # The reference rounds as much as what is held against it: the sum of 600000 columns passes through at
    # most 60 additions in either. A missed element is seen ten orders of magnitude earlier.
    (torch.float64, torch.float64): Tolerance(ulps=0, scale=128 * _DOUBLE, mean=8 * _DOUBLE),
}


class Sample(NamedTuple):
    """Positional arguments of a default or `.out` overload."""

    input: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = EPS


def sample_inputs(kernel, device, shape, *, weight="element", bias="element", eps=EPS, seed=0):
    """A Sample with the same values on every device. `weight` and `bias` are None, "element" (the
    kernel's element type) or "float32"; both are values that float16 holds exactly.

    The rows' mean is about half their standard deviation, so that a mean left out is seen.
    """
    draw = torch.Generator().manual_seed(seed)
    dtypes = {"element": kernel.dtype, "float32": torch.float32}

    def parameter(kind, values):
        return None if kind is None else values.half().to(dtypes[kind]).to(device)

    x = (torch.randn(shape, generator=draw) + 0.5).to(kernel.dtype).to(device)
    w = torch.rand(shape[-1:], generator=draw) + 0.5
    b = torch.randn(shape[-1:], generator=draw)
    return Sample(x, parameter(weight, w), parameter(bias, b), eps)


class Reference(NamedTuple):
    """What layer_norm_float64 returns, all float64."""

    y: torch.Tensor  # of x's shape
    normalised: torch.Tensor  # y before weight and bias
    mean: torch.Tensor  # [..., 1]
    rstd: torch.Tensor  # [..., 1]


def layer_norm_float64(x, weight=None, bias=None, eps=EPS):
    """y = (x - mean)·rstd·weight + bias in float64, by two passes over the rounded x, weight and bias."""
    x = x.double()
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    normalised = centred * rstd
    y = normalised if weight is None else normalised * weight.double()
    return Reference(y if bias is None else y + bias.double(), normalised, mean, rstd)


def ulp(value, dtype):
    """Spacing of the numbers of `dtype` at `value`, a float tensor of at least its range."""
    info = torch.finfo(dtype)
    size = value.abs().clamp(min=info.tiny)
    # size / mantissa is a power of two. (torch.ldexp would do, but under 2.11 it runs on the current GPU, whichever
    # holds its tensors.)
    return size / torch.frexp(size).mantissa * (info.eps / 2)


def allowed_error(kernel, reference, weight=None, bias=None):
    """The kernel's tolerance, element by element; float32 is precise enough for it."""
    tolerance = TOLERANCES[kernel.dtype, kernel.acc_dtype]
    size_w = 1.0 if weight is None else weight.float().abs()
    size_b = 0.0 if bias is None else bias.float().abs()
    mean_in_sigmas = (reference.mean * reference.rstd).abs().float()
    allowed = (tolerance.scale * (1 + reference.normalised.float().abs()) + tolerance.mean * mean_in_sigmas) * size_w
    allowed += tolerance.scale * size_b
    if tolerance.ulps:
        allowed += tolerance.ulps * ulp(reference.y.float(), kernel.dtype)
    return allowed


def assert_matches_float64(kernel, y, x, weight=None, bias=None, eps=EPS):
    """y is a contiguous tensor of x's shape, dtype and device, within the tolerance of the reference."""
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert y.is_contiguous()
    reference = layer_norm_float64(x, weight, bias, eps)
    ratio = (y.double() - reference.y).abs().float() / allowed_error(kernel, reference, weight, bias)
    # Written so that a NaN in y fails.
    within = ratio <= 1
    if not within.all():
        worst = int(ratio.nan_to_num(nan=math.inf).argmax())
        raise AssertionError(
            f"{kernel.name} on {tuple(x.shape)}: {int((~within).sum())} elements are off, the worst at flat index "
            f"{worst}: got {y.reshape(-1)[worst]:.8g}, expected {reference.y.reshape(-1)[worst]:.8g}, "
            f"{ratio.reshape(-1)[worst]:.3g} times what is allowed"
        )


def bits(t):
    """The tensor's bits as integers, so that NaNs compare equal and 0.0 differs from -0.0."""
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def in_padding(values, offset=0, row_stride=None, padding=math.nan):
    """A copy of the [rows, cols] `values` in storage of `padding`: its base lies `offset` elements past an
    aligned address and its rows are `row_stride` apart. Returns (the view, all of its storage)."""
    rows, cols = values.shape
    row_stride = row_stride or cols
    flat = torch.full((offset + rows * row_stride + 16,), padding, dtype=values.dtype, device=values.device)
    view = flat.as_strided((rows, cols), (row_stride, 1), offset)
    view.copy_(values)
    return view, flat


def call_out(kernel, sample, out=None):
    """The `.out` overload into a poisoned buffer (or `out`), which is returned."""
    out = torch.full_like(sample.input, math.nan, memory_format=torch.contiguous_format) if out is None else out
    assert kernel.op.out(*sample, out=out) is None
    return out


def shares_storage(a, b):
    """Whether two tensors are views of one storage, an empty one included."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def good_arguments(kernel, device, shape, *, out=False):
    """The arguments of a good call by name, with an `out` of sevens if asked for one."""
    arguments = sample_inputs(kernel, device, shape)._asdict()
    del arguments["eps"]
    if out:
        arguments["out"] = torch.full_like(arguments["input"], 7.0)
    return arguments


def call(kernel, arguments):
    """The overload that these named arguments are meant for."""
    return kernel.op.out(**arguments) if "out" in arguments else kernel.op.default(**arguments)
