"""What the tests of the gradients share: sample gradients of the output, float64 gradients, one tolerance table."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from norm_support import FWD, Norm, dtype_id
from reference import layer_norm_float64, same_bits, ulp

import fastln

BWD = torch.ops.fastln.layer_norm_bwd

ALL = (True, True, True)
TENSORS = ("input", "weight", "bias")
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
WIDE |= {torch.float64: torch.float64}

# dtypes of input, weight and bias
MIXTURES = {
    "float16_with_float32": (torch.float16, torch.float32, torch.float32),
    "bfloat16_with_float32": (torch.bfloat16, torch.float32, torch.float32),
    "float16_with_float32_weight": (torch.float16, torch.float32, torch.float16),
    "bfloat16_with_float32_bias": (torch.bfloat16, torch.bfloat16, torch.float32),
    "float16_with_bfloat16": (torch.float16, torch.bfloat16, torch.bfloat16),
    "float32_with_float16": (torch.float32, torch.float16, torch.float16),
    "float32_with_float64": (torch.float32, torch.float64, torch.float64),
    "float64_with_float32": (torch.float64, torch.float32, torch.float32),
}


class Tolerance(NamedTuple):
    """With g = dy·weight, the row's averages <·>, and the statistics' errors d = mean·|mean|/sigma, an error is allowed
    up to

        dx       ulp(dx) + rstd · (scale·(|g| + <|g|> + (1 + |xhat|)·<|g·xhat|>) + d·(|<g·xhat>| + |xhat|·<|g|>))
        dweight  ulp(dw) + sum over the rows of |dy| · (scale·|xhat| + d)
        dbias    ulp(db) + sum over the rows of |dy| · scale

    The first term is for a gradient in another dtype than the sums: half an ulp for the rounding to nearest, half for a
    sum that lies on the other side of the middle between two numbers. `scale` is the rounding of sums and products,
    `mean` what the rounding of the mean leaves in x - mean.
    """

    scale: float
    mean: float


# By the dtype of the sums. 1e-5 is what is asked of float32; a sum is a tree, or on a CPU a few chains, of at most
# 16384 additions, whose roundings of 2^-24 add up like a random walk.
TOLERANCES = {
    torch.float32: Tolerance(scale=1e-5, mean=8 * 2.0**-24),
    torch.float64: Tolerance(scale=128 * 2.0**-53, mean=8 * 2.0**-53),
}


def upstream(sample, seed=9):
    """A gradient of the output with no pattern in it, the same on every device."""
    draw = torch.Generator().manual_seed(seed)
    x = sample.input
    return torch.randn(x.shape, generator=draw).to(x.dtype).to(x.device)


def stats(sample):
    """mean and rstd as the forward gives them."""
    return FWD(*sample)[1:]


def backward(dy, sample, mask=ALL, statistics=None):
    """layer_norm_bwd after layer_norm_fwd."""
    mean, rstd = stats(sample) if statistics is None else statistics
    x, shape, weight, bias, _ = sample
    return BWD(dy, x, shape, mean, rstd, weight, bias, mask)


def gradients_float64(dy, sample):
    """Float64 autograd of the formula, each gradient with what its error may be: {name: (gradient, allowed)},
    flattened to rows and columns."""
    dims = len(sample.normalized_shape)
    x = sample.input.detach().double().flatten(-dims)
    x, dy = (t.reshape(-1, x.shape[-1]) for t in (x, dy.double().flatten(-dims)))
    weight = torch.ones(x.shape[-1:], device=x.device) if sample.weight is None else sample.weight.detach().flatten()
    leaves = [x, weight.double(), torch.zeros_like(weight, dtype=torch.float64)]
    leaves = [t.requires_grad_() for t in leaves]
    reference = layer_norm_float64(*leaves, sample.eps)
    dx, dweight, dbias = torch.autograd.grad(reference.y, leaves, dy)

    _, xhat, mean, rstd = (t.detach() for t in reference)
    scale, of_mean = TOLERANCES[WIDE[sample.input.dtype]]
    g = dy * leaves[1].detach()
    d = of_mean * (mean * rstd).abs()

    def average(t):
        return t.mean(-1, keepdim=True)

    sizes = g.abs() + average(g.abs()) + (1 + xhat.abs()) * average((g * xhat).abs())
    allowed_dx = scale * sizes + d * (average(g * xhat).abs() + xhat.abs() * average(g.abs()))
    allowed_dweight = (dy.abs() * (scale * xhat.abs() + d)).sum(0)
    return {
        "input": (dx, rstd * allowed_dx),
        "weight": (dweight, allowed_dweight),
        "bias": (dbias, scale * dy.abs().sum(0)),
    }


def dtypes_of_gradients(sample):
    """A parameter's own dtype, or that of the sums where there is no parameter."""
    wide = WIDE[sample.input.dtype]
    weight, bias = (wide if t is None else t.dtype for t in (sample.weight, sample.bias))
    return dict(zip(TENSORS, (sample.input.dtype, weight, bias), strict=True))


def assert_gradients_match_float64(got, dy, sample, names=TENSORS):
    """`got` has a new contiguous gradient for each of `names`, within its tolerance, and None for the others."""
    expected, dtypes = gradients_float64(dy, sample), dtypes_of_gradients(sample)
    for name, grad in zip(TENSORS, got, strict=True):
        if name not in names:
            assert grad is None, f"there is a gradient of {name}"
            continue
        assert grad is not None, f"there is no gradient of {name}"
        shape = sample.input.shape if name == "input" else tuple(sample.normalized_shape)
        assert (grad.shape, grad.dtype, grad.device) == (shape, dtypes[name], sample.input.device)
        assert grad.is_contiguous()
        reference, allowed = expected[name]
        if grad.dtype != WIDE[sample.input.dtype]:
            allowed = allowed + ulp(reference, grad.dtype)
        off = (grad.double().reshape(reference.shape) - reference).abs()
        # Written so that a NaN fails.
        within = off <= allowed
        if not within.all():
            ratio = (off / allowed).nan_to_num(nan=math.inf)
            worst = int(ratio.argmax())
            raise AssertionError(
                f"gradient of {name}, {describe(sample)}: {int((~within).sum())} elements are off, the worst at "
                f"flat index {worst}: got {grad.flatten()[worst]:.8g}, expected {reference.flatten()[worst]:.8g}, "
                f"{ratio.flatten()[worst]:.3g} times what is allowed"
            )


def describe(sample: Norm) -> str:
    tensors = zip(TENSORS, (sample.input, sample.weight, sample.bias), strict=True)
    return ", ".join(f"{name} {dtype_id(t.dtype)}{list(t.shape)}" for name, t in tensors if t is not None)


# ------------------------------------------------------------------------------------ training steps


def leaves(sample, *names):
    """The sample with leaves of its own, of which those in `names` require grad."""
    values = {name: getattr(sample, name) for name in TENSORS}
    return sample._replace(
        **{
            name: value.detach().clone().requires_grad_(name in names)
            for name, value in values.items()
            if value is not None
        }
    )


def grads(sample):
    return [None if t is None else t.grad for t in (sample.input, sample.weight, sample.bias)]


def all_same(got, expected):
    return all(a is b is None or same_bits(a, b) for a, b in zip(got, expected, strict=True))


def block(sample, call=fastln.layer_norm):
    """A function of x with a norm between other ops."""
    return lambda x: call(x * 2, *sample[1:]).sin()


def step(function, x):
    """Gradients of a step by x, and by what else `function` holds."""
    x = x.detach().clone().requires_grad_()
    function(x).sum().backward()
    return x.grad
