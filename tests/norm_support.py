"""What the tests of ``fastln.layer_norm`` share: its dtypes, sample inputs, its check against float64, forced plans."""

from __future__ import annotations

import contextlib
import math
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


# name: (dimensions of a row, view of what draw(*shape) gives, with rows of k elements)
LAYOUTS = {
    "contiguous": (1, lambda draw, k: draw(4, 6, k)),
    "a_row": (1, lambda draw, k: draw(k)),
    "transposed": (1, lambda draw, k: draw(k, 5).t()),
    "batch_transposed": (1, lambda draw, k: draw(3, 4, k).transpose(0, 1)),
    "permuted": (1, lambda draw, k: draw(2, k, 3, 5).permute(0, 2, 3, 1)),
    "channels_last": (1, lambda draw, k: draw(2, 3, 4, k).to(memory_format=torch.channels_last)),
    "channels_last_over_channels_too": (3, lambda draw, k: draw(2, 3, 4, k).to(memory_format=torch.channels_last)),
    "rows_transposed_within": (2, lambda draw, k: draw(5, k, 3).transpose(1, 2)),
    "rows_with_gaps_within": (2, lambda draw, k: draw(5, 3, k + 2)[:, :, :k]),
    "rows_of_two_dimensions_apart": (2, lambda draw, k: draw(5, 4, k)[:, :3]),
    "expanded_rows": (1, lambda draw, k: draw(1, k).expand(5, k)),
    "expanded_batch": (1, lambda draw, k: draw(3, k).expand(4, 3, k)),
    "expanded_columns": (1, lambda draw, k: draw(5, 1).expand(5, k)),
    "expanded_number": (1, lambda draw, k: draw(1).expand(3, k)),
    "column_strided": (1, lambda draw, k: draw(5, 2 * k)[:, ::2]),
    "row_strided": (1, lambda draw, k: draw(5, k + 8)[:, :k]),
    "row_strided_oddly": (1, lambda draw, k: draw(5, k + 3)[:, :k]),
    "every_other_row": (1, lambda draw, k: draw(10, k)[::2]),
    "one_head_of_several": (1, lambda draw, k: draw(6, 3, 2, k)[:, 1]),
    "one_part_of_a_row": (1, lambda draw, k: draw(6, 3 * k).split(k, dim=-1)[1]),
    "overlapping_windows": (1, lambda draw, k: draw(k + 12).unfold(0, k, 3)),
    "shifted": (1, lambda draw, k: draw(5, k + 1)[:, 1:]),
    "size_one_dimensions": (1, lambda draw, k: draw(1, 5, 1, k).as_strided((1, 5, 1, k), (7, k, 3, 1))),
    "one_row_of_a_far_stride": (1, lambda draw, k: draw(1, k).as_strided((1, k), (3, 1))),
    "no_rows": (1, lambda draw, k: draw(0, k)),
    "no_rows_transposed": (1, lambda draw, k: draw(k, 0).t()),
    "no_columns": (1, lambda draw, k: draw(3, 0)),
    "no_batch": (1, lambda draw, k: draw(2, 0, k)),
}


def in_layout(name, cols, dtype, device, seed=0):
    """A sample whose input has that layout, with rows of `cols` elements, or cols of one where it has several
    dimensions."""
    dims, view = LAYOUTS[name]
    draw = torch.Generator().manual_seed(seed)
    x = view(lambda *shape: (torch.randn(shape, generator=draw) + 0.5).to(dtype).to(device), cols)
    return norm_inputs(dtype, device, x.shape, dims=dims).of(x)


def to_the_last_byte(values, offset, gap, device):
    """The rows of `values`, `gap` elements apart, `offset` elements into an allocation that ends with them."""
    rows, cols = values.shape
    flat = torch.full((offset + rows * (cols + gap) - gap,), math.nan, dtype=values.dtype, device=device)
    view = flat.as_strided((rows, cols), (cols + gap, 1), offset)
    view.copy_(values)
    return view


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
