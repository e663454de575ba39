"""The values of the eight ops: against float64, over every size, parameter form, eps and overload."""

import itertools

import pytest
import torch
from reference import COLS, EPS, Sample, assert_matches_float64, call_out, same_bits, sample_inputs
from shared import wrong_results_of_two_threads

ROWS = (0, 1, 2, 5, 128)
PARAMETER = (None, "element", "float32")
SOME_COLS = (1, 7, 64, 321, 1025)


@pytest.mark.parametrize("cols", COLS)
def test_matches_float64_reference(kernel, cols, device):
    for shape in [(cols,), *((rows, cols) for rows in ROWS), (2, 3, cols)]:
        sample = sample_inputs(kernel, device, shape)
        assert_matches_float64(kernel, kernel.op(*sample), *sample)


@pytest.mark.parametrize("cols", COLS)
def test_out_overload_writes_every_element_of_a_poisoned_out(kernel, cols, device):
    sample = sample_inputs(kernel, device, (5, cols))
    assert same_bits(call_out(kernel, sample), kernel.op(*sample))


@pytest.mark.parametrize("cols", SOME_COLS)
@pytest.mark.parametrize(("weight", "bias"), list(itertools.product(PARAMETER, PARAMETER)))
def test_weight_and_bias_are_each_optional_and_of_either_dtype(kernel, weight, bias, cols, device):
    sample = sample_inputs(kernel, device, (5, cols), weight=weight, bias=bias)
    y = kernel.op(*sample)
    assert_matches_float64(kernel, y, *sample)
    assert same_bits(call_out(kernel, sample), y)


@pytest.mark.parametrize("cols", SOME_COLS)
def test_float32_parameters_give_the_bits_of_the_same_values_in_the_element_type(kernel, cols, device):
    element = kernel.op(*sample_inputs(kernel, device, (5, cols)))
    for weight, bias in (("float32", "element"), ("element", "float32"), ("float32", "float32")):
        assert same_bits(kernel.op(*sample_inputs(kernel, device, (5, cols), weight=weight, bias=bias)), element)


@pytest.mark.kernels(accumulate="float32")
def test_float32_parameters_are_not_rounded_to_the_element_type(kernel, device):
    # 1 + 2^-11 rounds to 1 in half, which would hide what a bias of -x̂ lays bare.
    x = sample_inputs(kernel, device, (1, 64)).input
    weight = torch.full((64,), 1 + 2.0**-11, device=device)
    bias = -kernel.op(x)[0].float()
    assert_matches_float64(kernel, kernel.op(x, weight, bias), x, weight, bias)


def test_none_is_a_weight_of_ones_and_a_bias_of_zeros(kernel, device):
    x, weight, bias, _ = sample_inputs(kernel, device, (5, 321))
    ones, zeros = torch.ones_like(weight), torch.zeros_like(bias)
    assert torch.equal(kernel.op(x), kernel.op(x, ones, zeros))
    assert torch.equal(kernel.op(x, weight), kernel.op(x, weight, zeros))
    assert torch.equal(kernel.op(x, None, bias), kernel.op(x, ones, bias))


def test_arguments_are_accepted_by_keyword(kernel, device):
    x, weight, bias, eps = sample_inputs(kernel, device, (5, 33), eps=0.25)
    expected = kernel.op(x, weight, bias, eps)
    assert same_bits(kernel.op(input=x, eps=eps, bias=bias, weight=weight), expected)
    out = torch.empty_like(x)
    kernel.op.out(input=x, out=out, eps=eps, bias=bias, weight=weight)
    assert same_bits(out, expected)


@pytest.mark.parametrize("cols", SOME_COLS)
def test_scalar_overload_is_the_default_with_constant_parameters(kernel, cols, device):
    x = sample_inputs(kernel, device, (5, cols)).input
    for weight, bias, eps in ((1.5, -0.25, EPS), (-2.0, 3.0, 0.5), (0.0, 1.0, EPS)):
        filled = Sample(x, torch.full_like(x[0], weight), torch.full_like(x[0], bias), eps)
        y = kernel.op.scalar(x, weight, bias, eps)
        assert_matches_float64(kernel, y, *filled)
        assert same_bits(y, kernel.op(*filled))


def test_scalar_overload_takes_integers_keywords_and_the_default_eps(kernel, device):
    x = sample_inputs(kernel, device, (5, 33)).input
    expected = kernel.op.scalar(x, 2.0, 3.0, EPS)
    assert same_bits(kernel.op.scalar(x, 2, 3), expected)
    assert same_bits(kernel.op.scalar(input=x, bias=3.0, weight=2.0), expected)
    assert same_bits(kernel.op(x, 2.0, 3.0), expected)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-2, 0.5, 100.0])
def test_eps_is_added_to_the_variance(kernel, eps, device):
    sample = sample_inputs(kernel, device, (5, 100), eps=eps)
    x, weight, bias, _ = sample
    y = kernel.op(*sample)
    assert_matches_float64(kernel, y, *sample)
    assert same_bits(kernel.op(x, weight, bias, eps=eps), y)
    assert same_bits(call_out(kernel, sample), y)


def test_default_eps_is_1e_5(kernel, device):
    # Values of about 1e-3, whose variance eps outweighs.
    x, weight, bias, _ = sample_inputs(kernel, device, (5, 64))
    x = x * 2.0**-10
    assert same_bits(kernel.op(x, weight, bias), kernel.op(x, weight, bias, 1e-5))
    assert not torch.equal(kernel.op(x, weight, bias), kernel.op(x, weight, bias, 1e-6))


@pytest.mark.parametrize("eps", [1e-12, 1e-8, 2.0**-25, 1e-5])
def test_a_constant_row_is_exactly_bias_however_small_eps_is(kernel, eps, device):
    """eps below half's smallest positive number is raised to it: as 0 it would make 0·inf."""
    weight, bias = sample_inputs(kernel, device, (3, 10))[1:3]
    for value in (0.0, 1.0, -3.0):
        y = kernel.op(torch.full((3, 10), value, dtype=kernel.dtype, device=device), weight, bias, eps)
        assert torch.equal(y, bias.expand(3, 10))


@pytest.mark.parametrize("shape", [(33,), (4, 33), (2, 3, 33), (2, 2, 2, 33), (1, 1, 1, 1, 33)])
def test_leading_dimensions_are_rows(kernel, shape, device):
    sample = sample_inputs(kernel, device, shape)
    y = kernel.op(*sample)
    assert_matches_float64(kernel, y, *sample)
    assert same_bits(y, kernel.op(sample.input.reshape(-1, 33), *sample[1:]).reshape(shape))


def test_the_same_call_gives_the_same_bits_twice(kernel, device):
    for cols in (33, 1025):
        sample = sample_inputs(kernel, device, (128, cols))
        assert same_bits(kernel.op(*sample), kernel.op(*sample))


def test_input_weight_and_bias_are_left_as_they_were(kernel, device):
    sample = sample_inputs(kernel, device, (5, 321))
    before = [t.clone() for t in sample[:3]]
    kernel.op(*sample)
    call_out(kernel, sample)
    kernel.op.scalar(sample.input, 2.0, 3.0)
    assert all(same_bits(t, b) for t, b in zip(sample[:3], before, strict=True))


@pytest.mark.parametrize("cols", SOME_COLS)
def test_out_may_be_the_input_itself(kernel, cols, device):
    sample = sample_inputs(kernel, device, (5, cols))
    expected = kernel.op(*sample)
    assert same_bits(call_out(kernel, sample, out=sample.input), expected)


def test_two_threads_calling_at_once_get_their_own_results(kernel, device):
    samples = [sample_inputs(kernel, device, (64, 257), seed=seed) for seed in range(2)]
    assert wrong_results_of_two_threads(kernel.op, samples) == [0, 0]


def test_a_row_on_the_cpu_does_not_depend_on_the_number_of_threads(kernel):
    sample = sample_inputs(kernel, "cpu", (128, 1025))
    threads, expected = torch.get_num_threads(), kernel.op(*sample)
    try:
        torch.set_num_threads(1)
        assert same_bits(kernel.op(*sample), expected)
    finally:
        torch.set_num_threads(threads)
