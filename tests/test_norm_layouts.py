"""fastln.layer_norm of any layout and alignment: the bits of the contiguous copy, in a tensor of its own, as the
fakes announce it."""

import pytest
import torch
from norm_support import FWD, LAYOUTS, OP, assert_norm_matches_float64, each, in_layout, norm_inputs, whole_cols
from reference import in_padding, same_bits, shares_storage
from torch._subclasses.fake_tensor import FakeTensorMode

import fastln


@pytest.fixture(params=LAYOUTS)
def layouts(request, dtype, device):
    """Samples of one layout, with rows of which 16-byte accesses leave nothing, and something."""
    return [in_layout(request.param, k, dtype, device) for k in (40, 33, 1)]


def dense(x):
    """A copy of x that begins at an aligned address."""
    return x.clone(memory_format=torch.contiguous_format)


def describe(t):
    return t.shape, t.stride(), t.dtype, t.storage_offset()


@each()
def test_every_layout_gives_the_bits_of_its_contiguous_copy(dtype, layouts):
    for sample in layouts:
        y = fastln.layer_norm(*sample)
        assert_norm_matches_float64(y, sample)
        copied = sample.of(dense(sample.input))
        assert same_bits(y, fastln.layer_norm(*copied))
        assert all(same_bits(a, b) for a, b in zip(FWD(*sample), FWD(*copied), strict=True))


# Neither what a fake announces nor where an output lies depends on the width, so one of them will do.
@each(torch.float16, torch.float64)
def test_fake_and_meta_results_are_the_real_ones_but_for_values(dtype, layouts):
    sample = layouts[1]
    x, _, weight, bias, _ = sample
    on_meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    meta = sample._replace(input=on_meta, weight=weight.to("meta"), bias=bias.to("meta"))
    with FakeTensorMode() as mode:
        fake = sample._replace(
            **{name: mode.from_tensor(getattr(sample, name)) for name in ("input", "weight", "bias")}
        )
    for call in (lambda *a: [fastln.layer_norm(*a)], lambda *a: [OP(*a)], FWD):
        for r, f, m in zip(call(*sample), call(*fake), call(*meta), strict=True):
            assert describe(r) == describe(f) == describe(m)
            assert r.storage_offset() == 0
            assert r.device == f.device == x.device
            assert m.device.type == "meta"


@each(torch.float16, torch.float32)
def test_output_shares_storage_with_no_argument(dtype, layouts):
    x, shape, weight, bias, _ = sample = layouts[1]
    for y in (fastln.layer_norm(*sample), fastln.layer_norm(x, shape), OP(x, shape), FWD(*sample)[0]):
        assert not any(shares_storage(y, t) for t in (x, weight, bias))


def test_a_fake_gpu_tensor_needs_no_gpu():
    """Programs for a GPU are traced and exported on machines without one."""
    with FakeTensorMode():
        sample = norm_inputs(torch.float16, "cuda:0", (3, 33))
        for y in (fastln.layer_norm(*sample), OP(sample.input, [33]), *FWD(*sample)):
            assert y.device == torch.device("cuda:0")
            assert y.is_contiguous()


def misaligned(values, offset, gap=0):
    return in_padding(values, offset, row_stride=values.shape[1] + gap)[0]


# Each on its own so that a failure names the offset.
@each()
@pytest.mark.parametrize("offset", range(1, 8))
def test_a_misaligned_base_changes_no_bit(dtype, offset, device):
    wide = (4098, 4100, whole_cols(dtype, 300), whole_cols(dtype, 1024))
    for cols in (1, 7, 8, 33, 34, 100, 320, 516, 768, 770, 1025, *wide):
        sample = norm_inputs(dtype, device, (5, cols))
        expected = fastln.layer_norm(*sample)
        x = misaligned(sample.input, offset)
        weight, bias = misaligned(sample.weight[None], offset)[0], misaligned(sample.bias[None], 8 - offset)[0]
        for other in (sample.of(x), sample._replace(weight=weight, bias=bias), sample.of(x)._replace(weight=weight)):
            assert same_bits(fastln.layer_norm(*other), expected)


@each()
@pytest.mark.parametrize("gap", [1, 2, 3, 4, 7, 8])
def test_rows_apart_by_any_stride_give_the_same_bits(dtype, gap, device):
    for cols in (1, 7, 33, 34, 100, 320, 516, 768, 770, 1025, whole_cols(dtype, 300)):
        sample = norm_inputs(dtype, device, (37, cols))
        expected = fastln.layer_norm(*sample)
        for offset in (0, 1, 16 // dtype.itemsize):
            assert same_bits(fastln.layer_norm(*sample.of(misaligned(sample.input, offset, gap))), expected)


@each()
def test_wide_rows_of_any_alignment_and_stride_give_the_same_bits(dtype, cuda):
    """Widths of each plan that a shifted row cannot have: past 512 threads, a cluster, and the row in chunks."""
    for pieces in (2048, 4096, 8192, 8704, 16384, 32768, 33000, 66000):
        sample = norm_inputs(dtype, cuda, (3, whole_cols(dtype, pieces)))
        expected = fastln.layer_norm(*sample)
        assert_norm_matches_float64(expected, sample)
        for offset, gap in ((1, 0), (0, 1), (0, 16), (3, 5), (16, 0)):
            x = misaligned(sample.input, offset, gap)
            assert same_bits(fastln.layer_norm(*sample.of(x)), expected)
            assert all(same_bits(a, b) for a, b in zip(FWD(*sample.of(x)), FWD(*sample), strict=True))


@each(torch.float16)
def test_rows_that_cannot_be_read_in_place_are_copied_once(dtype, cuda):
    """Of plans that take rows of whole pieces alone."""
    for pieces in (8192, 32768):
        sample = norm_inputs(dtype, cuda, (64, whole_cols(dtype, pieces)))
        size = sample.input.numel() * sample.input.element_size()
        for offset, gap in ((1, 0), (0, 1), (3, 5)):
            x = misaligned(sample.input, offset, gap)
            fastln.layer_norm(*sample.of(x))
            before = torch.cuda.memory_allocated(cuda)
            torch.cuda.reset_peak_memory_stats(cuda)
            fastln.layer_norm(*sample.of(x))
            assert torch.cuda.max_memory_allocated(cuda) - before < 2.5 * size  # the copy, and the output


@each()
def test_parameters_of_any_stride_give_the_same_bits(dtype, device):
    sample = norm_inputs(dtype, device, (5, 33))
    expected = fastln.layer_norm(*sample)
    both = torch.stack([sample.weight, sample.bias], dim=1)
    assert same_bits(fastln.layer_norm(*sample._replace(weight=both[:, 0], bias=both[:, 1])), expected)
    numbers = torch.tensor([0.75, -0.5], dtype=dtype, device=device)
    expanded = sample._replace(weight=numbers[0].expand(33), bias=numbers[1].expand(33))
    filled = sample._replace(weight=expanded.weight.clone(), bias=expanded.bias.clone())
    assert same_bits(fastln.layer_norm(*expanded), fastln.layer_norm(*filled))
