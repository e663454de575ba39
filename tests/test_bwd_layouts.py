"""fastln::layer_norm_bwd of any layout and alignment of grad_out and input: the bits of the contiguous copies."""

import math

import pytest
import torch
from bwd_support import ALL, all_same, assert_gradients_match_float64, backward, stats, upstream
from norm_support import LAYOUTS, each, in_layout, norm_inputs, whole_cols
from reference import in_padding, shares_storage
from torch._subclasses.fake_tensor import FakeTensorMode


def dense(t):
    """A copy of t that begins at an aligned address."""
    return t.clone(memory_format=torch.contiguous_format)


@each()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_bits_of_its_contiguous_copy(layout, dtype, device):
    for cols in (40, 33, 1) if device.type == "cuda" else (33,):
        sample = in_layout(layout, cols, dtype, device)
        dy = in_layout(layout, cols, dtype, device, seed=1).input
        copied, dy_copied = sample.of(dense(sample.input)), dense(dy)
        statistics = stats(copied)
        expected = backward(dy_copied, copied, ALL, statistics)
        for form, gradient in ((sample, dy), (sample, dy_copied), (copied, dy)):
            got = backward(gradient, form, ALL, statistics)
            assert all_same(got, expected)
            assert not any(shares_storage(t, a) for t in got for a in (gradient, form.input, form.weight, form.bias))
        if sample.input.numel():
            assert_gradients_match_float64(expected, dy_copied, copied)


@each(torch.float16, torch.float64)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_and_meta_results_are_the_real_ones_but_for_values(layout, dtype, device):
    def describe(t):
        return t.shape, t.stride(), t.dtype, t.storage_offset()

    sample = in_layout(layout, 33, dtype, device)
    dy, statistics = in_layout(layout, 33, dtype, device, seed=1).input, stats(sample)
    for form in (sample, sample.in_dtypes(torch.float32, None)):
        tensors = (dy, form.input, *statistics, form.weight, form.bias)
        with FakeTensorMode() as mode:
            fake = [None if t is None else mode.from_tensor(t) for t in tensors]
        meta = [None if t is None else t.to("meta") for t in tensors]
        for place in (0, 1):  # .to() makes some layouts dense
            t = tensors[place]
            meta[place] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        results = [
            backward(g, form._replace(input=x, weight=w, bias=b), ALL, (mean, rstd))
            for g, x, mean, rstd, w, b in (tensors, fake, meta)
        ]
        for real, of_fake, of_meta in zip(*results, strict=True):
            assert describe(real) == describe(of_fake) == describe(of_meta)
            assert (of_fake.device, of_meta.device.type) == (real.device, "meta")


@each()
@pytest.mark.parametrize("offset", range(1, 8))
def test_a_misaligned_base_changes_no_bit(dtype, offset, device):
    wide = (whole_cols(dtype, 300), whole_cols(dtype, 700) + 1, whole_cols(dtype, 2500), whole_cols(dtype, 1300) + 1)
    for cols in (1, 7, 33, 100, 320, 516, 769, 1024, 2500, *wide) if device.type == "cuda" else (33,):
        sample = norm_inputs(dtype, device, (5, cols))
        dy, statistics = upstream(sample), stats(sample)
        expected = backward(dy, sample, ALL, statistics)
        x, g = in_padding(sample.input, offset)[0], in_padding(dy, 8 - offset)[0]
        weight, bias = (in_padding(t[None], offset)[0][0] for t in (sample.weight, sample.bias))
        shifted = sample._replace(weight=weight, bias=bias)
        for gradient, form in ((g, sample), (dy, sample.of(x)), (g, sample.of(x)), (g, shifted.of(x))):
            assert all_same(backward(gradient, form, ALL, statistics), expected)


@each()
@pytest.mark.parametrize("gap", [1, 2, 3, 4, 8])
def test_rows_apart_by_any_stride_give_the_same_bits(dtype, gap, device):
    for cols in (1, 7, 33, 100, 320, 516, 769, 2500, whole_cols(dtype, 300)) if device.type == "cuda" else (33,):
        sample = norm_inputs(dtype, device, (37, cols))
        dy, statistics = upstream(sample), stats(sample)
        expected = backward(dy, sample, ALL, statistics)
        x = in_padding(sample.input, 0, row_stride=cols + gap)[0]
        g = in_padding(dy, 3, row_stride=cols + 2 * gap)[0]
        for gradient, form in ((g, sample), (dy, sample.of(x)), (g, sample.of(x))):
            assert all_same(backward(gradient, form, ALL, statistics), expected)


@each()
def test_many_rows_of_any_place_give_the_same_bits(dtype, cuda):
    """NaNs lie between the rows, which one launch takes or which are too many for it."""
    shapes = [(rows, cols) for rows in (900, 3100) for cols in (1, 9, 33, 100, 257, 263, 516, 768, 769)]
    shapes += [(700, whole_cols(dtype, 400) + 1), (400, whole_cols(dtype, 1000) + 1), (40, whole_cols(dtype, 1300) + 1)]
    for rows, cols in shapes:
        sample = norm_inputs(dtype, cuda, (rows, cols))
        dy, statistics = upstream(sample), stats(sample)
        expected = backward(dy, sample, ALL, statistics)
        assert_gradients_match_float64(expected, dy, sample)
        x, g = in_padding(sample.input, 1)[0], in_padding(dy, 3)[0]
        assert all_same(backward(g, sample.of(x), ALL, statistics), expected)
        x = in_padding(sample.input, 1, row_stride=cols + 3)[0]
        g = in_padding(dy, 3, row_stride=cols + 8)[0]
        apart = [backward(g, sample, ALL, statistics)]
        apart += [backward(gradient, sample.of(x), ALL, statistics) for gradient in (dy, g)]
        assert all(all_same(got, apart[0]) for got in apart)
        # Bundles, for which rows lie side by side, add the same products to the columns in another order.
        in_bundles = dtype.itemsize == 2 and rows > 2048 and cols % 4 != 0 and 8 <= cols < 264
        compared = 1 if in_bundles else 3
        assert all_same(apart[0][:compared], expected[:compared])
        assert_gradients_match_float64(apart[0], dy, sample)


@each()
def test_what_lies_around_the_arguments_is_not_read_or_written(dtype, device):
    """NaNs around every argument: none gets into a gradient, and each stays where it is."""
    for cols in (7, 33, 100, 320, 769):
        sample = norm_inputs(dtype, device, (6, cols))
        dy, (mean, rstd) = upstream(sample), stats(sample)
        expected = backward(dy, sample, ALL, (mean, rstd))
        views, storages = zip(
            *(in_padding(t, 3, row_stride=t.shape[1] + 5) for t in (dy, sample.input, mean, rstd)),
            *(in_padding(t[None], 5) for t in (sample.weight, sample.bias)),
            strict=True,
        )
        before = [t.clone() for t in storages]
        g, x, m, r, weight, bias = views
        got = backward(g, sample._replace(input=x, weight=weight[0], bias=bias[0]), ALL, (m, r))
        assert all_same(got, expected)
        assert all_same(storages, before)
        assert not any(math.isnan(t.float().sum().item()) for t in got)
