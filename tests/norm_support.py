"""What the tests of ``fastln.layer_norm`` share: its dtypes, sample inputs, its check against float64, forced plans."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import pytest
import torch
from reference import EPS, assert_matches_float64

import fastln
from fastln._norm import force_plan

OP = torch.ops.fastln.layer_norm
FWD = torch.ops.fastln.layer_norm_fwd

# Eager calls of the function and of the op take different ways to the kernel, so both are tested.
CALLS = {"function": fastln.layer_norm, "op": OP}


class Element(NamedTuple):
    """An input dtype, with the facts that the table of tolerances asks a kernel for."""

    name: str
    dtype: torch.dtype
    acc_dtype: torch.dtype


ELEMENTS = {
    torch.float16: Element("layer_norm of float16", torch.float16, torch.float32),
    torch.bfloat16: Element("layer_norm of bfloat16", torch.bfloat16, torch.float32),
    torch.float32: Element("layer_norm of float32", torch.float32, torch.float32),
    torch.float64: Element("layer_norm of float64", torch.float64, torch.float64),
}


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def each(*dtypes):
    """Parametrizes a test over these dtypes, or over all of them."""
    return pytest.mark.parametrize("dtype", dtypes or list(ELEMENTS), ids=dtype_id)


class Norm(NamedTuple):
    """Positional arguments of layer_norm and of layer_norm_fwd."""

    input: torch.Tensor
    normalized_shape: list[int]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float = EPS

    def of(self, x):
        """The same with another input."""
        return self._replace(input=x)

    def in_dtypes(self, weight, bias):
        """The same with weight and bias in these dtypes; None leaves one out."""
        return self._replace(
            weight=None if weight is None else self.weight.to(weight),
            bias=None if bias is None else self.bias.to(bias),
        )


def norm_inputs(dtype, device, shape, *, dims=1, eps=EPS, seed=0, scale=1.0, shift=0.5):
    """A Norm over the last `dims` dimensions with the same values on every device.

    x is scale·randn + shift, in the mean half a standard deviation off zero, so that a mean left out is
    seen. weight and bias are multiples of 1/64 up to 4, which every dtype holds exactly.
    """
    draw = torch.Generator().manual_seed(seed)
    shape = tuple(shape)
    row = list(shape[len(shape) - dims :])
    x = (torch.randn(shape, generator=draw, dtype=torch.float32) * scale + shift).to(dtype)
    weight = (torch.rand(row, generator=draw) * 64 + 32).round() / 64
    bias = (torch.randn(row, generator=draw) * 64).round().clamp(-256, 256) / 64
    return Norm(x.to(device), row, weight.to(device, dtype), bias.to(device, dtype), eps)


def assert_norm_matches_float64(y, sample):
    """y is a new contiguous tensor like the input, within the tolerance of its dtype."""
    x, shape, weight, bias, eps = sample
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert y.is_contiguous()
    rows = (t.flatten(-len(shape)) for t in (y, x))
    parameters = (None if t is None else t.flatten() for t in (weight, bias))
    assert_matches_float64(ELEMENTS[x.dtype], *rows, *parameters, eps)


@contextlib.contextmanager
def forced(plan):
    """Makes layer_norm use one variant wherever it can hold the row."""
    force_plan(plan)
    try:
        yield
    finally:
        force_plan(os.environ.get("FASTLN_PLAN", ""))


def whole_cols(dtype, pieces):
    """Columns of a row of so many pieces of 16 bytes."""
    return pieces * 16 // dtype.itemsize


def past_l2_rows(cols, dtype):
    """So many rows that input and output exceed the L2, where some plans have a variant of their own."""
    row_bytes = 2 * cols * dtype.itemsize
    return torch.cuda.get_device_properties("cuda").L2_cache_size * 3 // 2 // row_bytes + 1


def need_gpu_memory(gigabytes):
    """Skips the test on a GPU with less memory free."""
    torch.cuda.empty_cache()  # what an earlier test left in torch's cache counts as taken
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes:.0f} GB of free GPU memory")
