"""Numeric faults that users of other LayerNorm kernels have met (FAULTS.md), each a test named after the fault."""

import pytest
import torch
from reference import Sample, assert_matches_float64, call_out, layer_norm_float64, same_bits, sample_inputs


def random(shape, kernel, device, *, scale=1.0, shift=0.0):
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=draw) * scale + shift).to(kernel.dtype).to(device)


@pytest.mark.kernels(element="float32")
def test_case_01_one_pass_variance_of_a_large_mean_is_not_zero(kernel, device):
    x = random((1024 if device.type == "cuda" else 16, 32768), kernel, device, scale=0.01, shift=100)
    y = kernel.op(x)
    assert_matches_float64(kernel, y, x)
    reference = layer_norm_float64(x).y
    assert (y - reference).abs().max() < 5e-3
    variance = y.double().var(-1, correction=0) / reference.var(-1, correction=0)
    assert (variance - 1).abs().max() < 1e-3


@pytest.mark.kernels(accumulate="float32")
def test_case_02_large_mean_with_few_columns(kernel, device):
    x = random((5, 4), kernel, device, shift=2000)
    assert (kernel.op(x).double() - layer_norm_float64(x).y).abs().max() < 1e-2


@pytest.mark.kernels(element="float16")
@pytest.mark.parametrize("eps", [1e-12, 1e-10, 3e-8])
def test_case_03_eps_below_half_does_not_become_zero(kernel, eps, device):
    zeros = torch.zeros(1, 10, dtype=kernel.dtype, device=device)
    bias = sample_inputs(kernel, device, (10,)).bias
    assert torch.equal(kernel.op(zeros, None, bias, eps)[0], bias)
    assert torch.equal(kernel.op(zeros, bias, bias, eps)[0], bias)
    assert torch.equal(kernel.op(zeros, eps=eps), zeros)
    assert (kernel.op.scalar(zeros, 2.0, 3.0, eps) == 3.0).all()


@pytest.mark.kernels(element="float16", accumulate="float32")
@pytest.mark.parametrize("cols", [100, 4096])
def test_case_04_squares_of_half_are_not_summed_in_half(kernel, cols, device):
    x = random((8, cols), kernel, device, scale=8000)
    y = kernel.op(x)
    assert y.isfinite().all()
    assert_matches_float64(kernel, y, x)


def test_case_05_a_single_column_is_exactly_bias(kernel, device):
    largest = torch.finfo(kernel.dtype).max
    for value in (1e6, -1e6, largest, -largest, 0.1, 0.0, torch.finfo(kernel.dtype).tiny):
        x = torch.full((4, 1), min(max(value, -largest), largest), dtype=kernel.dtype, device=device)
        weight, bias = (torch.tensor([v], dtype=kernel.dtype, device=device) for v in (2.0, 3.0))
        for y in (kernel.op(x, weight, bias), kernel.op.scalar(x, 2.0, 3.0), call_out(kernel, Sample(x, weight, bias))):
            assert (y == 3.0).all()


@pytest.mark.kernels(element="float32")
@pytest.mark.parametrize("cols", [2, 8, 1000, 16384])
def test_case_06_values_up_to_1e18_are_right(kernel, cols, device):
    draw = torch.Generator().manual_seed(0)
    for largest in (1e10, 1e15, 1e18):
        x = ((torch.rand(5, cols, generator=draw) * 2 - 1) * largest).to(device)
        x[0] = torch.tensor([largest, -largest], device=device).repeat(cols // 2)
        assert_matches_float64(kernel, kernel.op(x), x)


@pytest.mark.kernels(element="float32")
@pytest.mark.parametrize("cols", [2, 1000])
def test_case_06_values_past_the_range_of_their_squares_give_bias_on_every_device(kernel, cols, device):
    """(x - mean)² is infinite, rstd 0: the float32 form of the half-accumulating kernels' overflow."""
    weight, bias = sample_inputs(kernel, device, (cols,))[1:3]
    x = random((5, cols), kernel, device, scale=1e30)
    assert torch.equal(kernel.op(x, weight, bias), bias.expand(5, cols))


@pytest.mark.parametrize("cols", [1536, 100, 769])
def test_case_07_a_tail_does_not_add_the_square_of_the_mean(kernel, cols, device):
    x = random((64, cols), kernel, device, shift=5)
    assert_matches_float64(kernel, kernel.op(x), x)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("cols", [4, 33, 256, 1025, 8193])
def test_case_09_inf_row_leaves_neighbours_bitwise(kernel, cols, bad, device):
    x, weight, bias, _ = sample_inputs(kernel, device, (4, cols))
    expected = kernel.op(x, weight, bias)
    for row in (0, 3):
        spoiled = x.clone()
        spoiled[row, cols // 2] = bad
        y = kernel.op(spoiled, weight, bias)
        assert y[row].isnan().all()
        others = [r for r in range(4) if r != row]
        assert same_bits(y[others], expected[others])


def approximately(kernel, values):
    return pytest.approx(values, abs=1e-4 if kernel.element == "float32" else 2**-5)


def test_case_28_only_one_of_weight_and_bias(kernel, device):
    x, parameter = (torch.tensor(v, dtype=kernel.dtype, device=device) for v in ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]))
    assert kernel.op(x, None, parameter).tolist() == approximately(kernel, [8.7753, 20.0, 31.2247])
    assert kernel.op(x, parameter, None).tolist() == approximately(kernel, [-12.2473, 0.0, 36.7420])


def test_case_30_other_ops_work_after_a_call_without_affine(kernel, device):
    kernel.op(sample_inputs(kernel, device, (4, 33)).input)
    image = torch.ones(1, 1, 4, 4, device=device)
    assert torch.equal(torch.nn.functional.conv2d(image, image[..., :2, :2]), torch.full_like(image[..., :3, :3], 4))


def test_case_37_a_hundred_runs_give_the_same_bits(kernel, device):
    sample = sample_inputs(kernel, device, (1, 1024 if device.type == "cuda" else 8, 2048))
    first = kernel.op(*sample)
    assert all(same_bits(kernel.op(*sample), first) for _ in range(99))


def test_case_38_a_row_does_not_depend_on_its_batch(kernel, device):
    x = random((1, 6, 10, 100), kernel, device)
    assert same_bits(kernel.op(x)[:, :1], kernel.op(x[:, :1]))
    for cols in (33, 1025, 8193):
        sample = sample_inputs(kernel, device, (70, cols))
        whole = kernel.op(*sample)
        for begin, end in ((0, 1), (69, 70), (3, 8), (1, 70)):
            part = kernel.op(sample.input[begin:end], *sample[1:])
            assert same_bits(part, whole[begin:end])


def overflowing(kernel, device):
    """x·100 at 512 columns: the squares' sum is about 5e6, and most squares alone pass 65504."""
    sample = sample_inputs(kernel, device, (64, 512))
    return sample._replace(input=random((64, 512), kernel, device, scale=100))


@pytest.mark.kernels(accumulate="float16")
def test_overflow_makes_half_accumulating_kernels_return_exactly_bias(kernel, device):
    x, weight, bias, _ = overflowing(kernel, device)
    assert torch.equal(kernel.op(x, weight, bias), bias.expand_as(x))
    assert torch.equal(kernel.op(x, None, bias.float()), bias.expand_as(x))
    assert torch.equal(kernel.op(x, weight), torch.zeros_like(x))
    assert torch.equal(kernel.op(x), torch.zeros_like(x))
    assert (kernel.op.scalar(x, 2.0, 3.0) == 3.0).all()


@pytest.mark.kernels(accumulate="float32")
def test_overflow_of_half_leaves_float32_accumulating_kernels_right(kernel, device):
    sample = overflowing(kernel, device)
    assert_matches_float64(kernel, kernel.op(*sample), *sample)
