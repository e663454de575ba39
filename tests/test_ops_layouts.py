"""Any layout and any alignment gives the right rows, and nothing but the rows is read or written."""

import pytest
import torch
from reference import (
    assert_matches_float64,
    call_out,
    in_padding,
    same_bits,
    sample_inputs,
    shares_storage,
)
from torch._subclasses.fake_tensor import FakeTensorMode

# Inputs by layout, in float32: `any_layout` makes them of the kernel's element type.
LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6, 8),
    "transposed": lambda: torch.randn(8, 5).t(),
    "batch_transposed": lambda: torch.randn(3, 4, 33).transpose(0, 1),
    "permuted": lambda: torch.randn(2, 33, 3, 5).permute(0, 2, 3, 1),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded_rows": lambda: torch.randn(1, 33).expand(5, 33),
    "expanded_cols": lambda: torch.randn(5, 1).expand(5, 33),
    "expanded_to_one_number": lambda: torch.randn(1).expand(3, 33),
    "column_stride": lambda: torch.randn(5, 66)[:, ::2],
    "row_stride": lambda: torch.randn(5, 48)[:, :33],
    "every_other_row": lambda: torch.randn(10, 33)[::2],
    "shifted": lambda: torch.randn(5, 34)[:, 1:],
    "size_one_dimensions": lambda: torch.randn(1, 5, 1, 33).as_strided((1, 5, 1, 33), (7, 33, 3, 1)),
    "one_column_wide_stride": lambda: torch.randn(5, 9)[:, :1],
    "no_rows": lambda: torch.randn(0, 33),
    "no_rows_transposed": lambda: torch.randn(33, 0).t(),
    "no_columns": lambda: torch.randn(3, 0),
    "no_batch": lambda: torch.randn(2, 0, 33),
    "only_columns": lambda: torch.randn(33),
}


@pytest.fixture(params=LAYOUTS)
def any_layout(request, kernel, device):
    """A tensor of the kernel's element type in each layout, strides and storage offset included."""
    torch.manual_seed(0)
    values = LAYOUTS[request.param]()
    elements = values.untyped_storage().nbytes() // values.element_size()
    storage = values.as_strided((elements,), (1,), 0).to(kernel.dtype).to(device)
    return storage.as_strided(values.shape, values.stride(), values.storage_offset())


# Rows that end with an access of every kernel; past 8192 columns all of them loop.
@pytest.mark.parametrize("cols", [8, 512, 1024, 4096, 8200])
def test_every_variant_of_a_kernel_gives_the_same_bits(kernel, cols, device):
    # Other instructions are compiled for numbers, for vectors, for a mixture and for addresses that are not aligned.
    x = sample_inputs(kernel, device, (3, cols)).input
    weight = torch.full((cols,), 0.75, dtype=kernel.dtype, device=device)
    bias = torch.full_like(weight, -0.5)
    expected = kernel.op.scalar(x, 0.75, -0.5)
    for t in (x, in_padding(x, 1)[0], in_padding(x, 8, cols + 8)[0]):
        assert same_bits(kernel.op.scalar(t, 0.75, -0.5), expected)
        assert same_bits(kernel.op(t, weight, bias), expected)
        assert same_bits(kernel.op(t, weight.float(), bias), expected)
        assert same_bits(kernel.op(t, weight, bias.float()), expected)
        assert same_bits(kernel.op(t, weight.float(), bias.float()), expected)


def parameters_for(kernel, x):
    return sample_inputs(kernel, x.device, x.shape[-1:])[1:3]


def test_every_layout_gives_the_result_of_its_contiguous_copy(kernel, any_layout):
    x = any_layout
    weight, bias = parameters_for(kernel, x)
    dense = x.contiguous().clone()
    y = kernel.op(x, weight, bias)
    assert_matches_float64(kernel, y, x, weight, bias)
    assert same_bits(y, kernel.op(dense, weight, bias))
    assert same_bits(kernel.op.scalar(x, 1.5, 0.5), kernel.op.scalar(dense, 1.5, 0.5))
    out = torch.full(x.shape, 7.0, dtype=x.dtype, device=x.device)
    kernel.op.out(x, weight, bias, out=out)
    assert same_bits(out, y)


def test_fake_and_meta_outputs_have_the_real_ones_shape_strides_dtype_and_device(kernel, any_layout):
    def describe(t):
        return t.shape, t.stride(), t.dtype, t.storage_offset(), t.is_contiguous()

    x = any_layout
    calls = {
        "default": lambda t, w, b: kernel.op(t, w, b),
        "scalar": lambda t, w, b: kernel.op.scalar(t, 1.5, 0.5),
    }
    parameters = parameters_for(kernel, x)
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    for call in calls.values():
        real = call(x, *parameters)
        on_meta = call(meta, *(p.to("meta") for p in parameters))
        with FakeTensorMode() as mode:
            fake = call(*(mode.from_tensor(t) for t in (x, *parameters)))
        assert describe(real) == describe(fake) == describe(on_meta)
        assert fake.device == real.device
        assert on_meta.device.type == "meta"
        assert real.storage_offset() == 0


def test_a_fake_gpu_tensor_needs_no_gpu(kernel):
    """Programs for a GPU are traced and exported on machines without one."""
    with FakeTensorMode():
        sample = sample_inputs(kernel, "cuda:0", (3, 33))
        out = torch.empty(3, 33, dtype=kernel.dtype, device="cuda:0")
        kernel.op.out(*sample, out=out)
        for y in (kernel.op(*sample), kernel.op.scalar(sample.input.t(), 1.5, 0.5)):
            assert y.device == torch.device("cuda:0")
            assert y.is_contiguous() and y.dtype == kernel.dtype


def test_output_never_shares_storage_with_an_argument(kernel, any_layout):
    x = any_layout
    weight, bias = parameters_for(kernel, x)
    for y in (kernel.op(x, weight, bias), kernel.op(x), kernel.op.scalar(x, 1.0, 0.0)):
        assert not any(shares_storage(y, t) for t in (x, weight, bias))


@pytest.mark.parametrize("offset", range(1, 8))
def test_misaligned_base_pointers(kernel, offset, device):
    for cols in (8, 33, 320, 1025):
        values, weight, bias, _ = sample_inputs(kernel, device, (5, cols))
        x, _ = in_padding(values, offset)
        w, b = in_padding(weight[None], offset)[0][0], in_padding(bias[None], 8 - offset)[0][0]
        for arguments in ((x, weight, bias), (values, w, bias), (values, weight, b), (x, w, b), (x, None, b)):
            assert_matches_float64(kernel, kernel.op(*arguments), *arguments)


@pytest.mark.parametrize("offset", range(8))
def test_out_of_any_alignment_is_written_within_its_bounds(kernel, offset, device):
    for cols in (1, 7, 8, 33, 320, 322, 1025):
        sample = sample_inputs(kernel, device, (3, cols))
        out, storage = in_padding(torch.zeros_like(sample.input), offset, padding=7.0)
        expected = storage.clone()
        call_out(kernel, sample, out)
        assert_matches_float64(kernel, out, *sample)
        expected.as_strided(out.shape, out.stride(), offset).copy_(out)
        assert same_bits(storage, expected)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("gap", [1, 2, 3, 4, 7, 8])
def test_rows_apart_by_any_stride_are_read_without_what_lies_between_them(kernel, gap, offset, device):
    for cols in (1, 8, 33, 320, 1025):
        values, weight, bias, _ = sample_inputs(kernel, device, (5, cols))
        x, _ = in_padding(values, offset, row_stride=cols + gap)
        assert_matches_float64(kernel, kernel.op(x, weight, bias), values, weight, bias)


def test_weight_and_bias_of_any_stride(kernel, device):
    x, weight, bias, _ = sample_inputs(kernel, device, (5, 33))
    expected = kernel.op(x, weight, bias)
    strided = torch.stack([weight, bias], dim=1)
    assert same_bits(kernel.op(x, strided[:, 0], strided[:, 1]), expected)
    constant = torch.tensor([0.75, -0.5], dtype=kernel.dtype, device=device)
    expanded = kernel.op(x, constant[0].expand(33), constant[1].expand(33))
    assert same_bits(expanded, kernel.op.scalar(x, 0.75, -0.5))


def test_weight_and_bias_may_be_one_tensor_and_the_input_itself(kernel, device):
    row = sample_inputs(kernel, device, (33,)).input
    assert_matches_float64(kernel, kernel.op(row, row, row), row, row, row)
    assert same_bits(kernel.op(row, row, row), kernel.op(row.clone(), row.clone(), row.clone()))
