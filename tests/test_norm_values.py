"""The values of fastln.layer_norm: against float64 at every width, dtype and form of the parameters, and against
F.layer_norm."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from norm_support import CALLS, ELEMENTS, FWD, OP, assert_norm_matches_float64, each, norm_inputs
from reference import same_bits
from shared import wrong_results_of_two_threads

import fastln

SOME_WIDTHS = (1, 2, 7, 31, 64, 100, 257, 769, 1025)

# By the part of a GPU that a row of them occupies in float16.
EVERY_WIDTH = {
    "part_of_a_warp": (*range(1, 21), 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 384, 500),
    "warps": (512, 640, 760, 769, 1000, 1023, 1024, 1025, 1152, 1600, 2048, 2560, 3072, 4096, 4097, 5120, 6144),
    "a_block": (8192, 8193, 12288, 16384, 20480, 32768, 32769, 65536, 65537),
    "blocks": (100000, 131072, 262144, 600000),
}

SAME, WIDE = "input", torch.float32
# dtypes of weight and bias: None for no tensor, SAME for the input's.
PARAMETERS = {
    "both": (SAME, SAME),
    "only_weight": (SAME, None),
    "only_bias": (None, SAME),
    "none": (None, None),
    "float32": (WIDE, WIDE),
    "only_weight_in_float32": (WIDE, None),
    "float32_and_the_input's": (WIDE, SAME),
    "the_input's_and_float32": (SAME, WIDE),
    "float64": (torch.float64, torch.float64),
    "both_halves": (torch.float16, torch.bfloat16),
}


def with_every_parameter_form(sample):
    """The sample with weight and bias of each form, and the form's name."""
    for form, dtypes in PARAMETERS.items():
        yield form, sample.in_dtypes(*(sample.input.dtype if d == SAME else d for d in dtypes))


@each()
@pytest.mark.parametrize("cols", SOME_WIDTHS)
def test_matches_float64_with_every_form_of_parameters(dtype, cols, device):
    for shape in ((cols,), (1, cols), (5, cols), (2, 3, cols), (2, 1, 2, cols)):
        assert_norm_matches_float64(fastln.layer_norm(*(sample := norm_inputs(dtype, device, shape))), sample)
    for _, form in with_every_parameter_form(norm_inputs(dtype, device, (67, cols))):
        assert_norm_matches_float64(fastln.layer_norm(*form), form)


@each()
@pytest.mark.parametrize("place", EVERY_WIDTH)
def test_matches_float64_at_every_width(dtype, place, cuda):
    for cols in EVERY_WIDTH[place]:
        # So many rows that small ones fill more than a block, and hang over the last.
        sample = norm_inputs(dtype, cuda, (131 if cols <= 512 else 3, cols))
        for _, form in with_every_parameter_form(sample):
            assert_norm_matches_float64(fastln.layer_norm(*form), form)


@each()
def test_the_op_gives_the_bits_of_the_function(dtype, device):
    for cols in (7, 768, 1025):
        for _, form in with_every_parameter_form(norm_inputs(dtype, device, (5, cols))):
            assert same_bits(OP(*form), fastln.layer_norm(*form))


@each(torch.float16, torch.bfloat16)
def test_the_dtype_that_parameters_come_in_changes_no_bit(dtype, device):
    for cols in (1, 33, 768, 1025):
        sample = norm_inputs(dtype, device, (5, cols))
        expected = fastln.layer_norm(*sample)
        for dtypes in ((WIDE, WIDE), (WIDE, dtype), (dtype, WIDE), (torch.float64, torch.float64)):
            assert same_bits(fastln.layer_norm(*sample.in_dtypes(*dtypes)), expected)


@each(torch.float16, torch.bfloat16)
def test_float32_parameters_are_not_rounded_to_the_inputs_dtype(dtype, device):
    # 1 + 2^-11 rounds to 1 in both halves, which would hide what a bias of -x̂ lays bare.
    sample = norm_inputs(dtype, device, (1, 64)).in_dtypes(None, None)
    bias = -fastln.layer_norm(*sample)[0].float()
    sample = sample._replace(weight=torch.full((64,), 1 + 2.0**-11, device=device), bias=bias)
    assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


@each()
@pytest.mark.parametrize(
    ("shape", "dims"),
    [((4, 6, 129), 2), ((2, 3, 4, 8), 3), ((3, 4, 5), 3), ((5, 1, 33), 2), ((5, 33, 1), 2), ((7, 16, 64), 2)],
    ids=str,
)
def test_normalized_shape_of_several_dimensions(dtype, shape, dims, device):
    sample = norm_inputs(dtype, device, shape, dims=dims)
    y = fastln.layer_norm(*sample)
    assert_norm_matches_float64(y, sample)
    flat = (sample.input.flatten(-dims), [sample.weight.numel()], sample.weight.flatten(), sample.bias.flatten())
    assert same_bits(y.flatten(-dims), fastln.layer_norm(*flat))


def test_parameters_of_several_dimensions_may_lie_in_any_layout(device):
    sample = norm_inputs(torch.float32, device, (5, 4, 8), dims=2)
    transposed = sample._replace(weight=sample.weight.t().contiguous().t(), bias=sample.bias[:1].expand(4, 8))
    assert_norm_matches_float64(fastln.layer_norm(*transposed), transposed)


@each()
def test_eps_is_added_to_the_variance(dtype, device):
    for eps in (1e-12, 1e-6, 1e-2, 0.5, 100.0):
        for cols in (7, 768):
            sample = norm_inputs(dtype, device, (5, cols), eps=eps)
            assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


def test_default_eps_is_1e_5(device):
    x = norm_inputs(torch.float32, device, (5, 64)).input * 2.0**-10  # eps outweighs the variance
    assert same_bits(fastln.layer_norm(x, [64]), fastln.layer_norm(x, [64], eps=1e-5))
    assert not torch.equal(fastln.layer_norm(x, [64]), fastln.layer_norm(x, [64], eps=1e-6))


@each(torch.float32, torch.float64)
@pytest.mark.parametrize("cols", [4, 257, 4096])
def test_a_mean_of_10000_sigma(dtype, cols, device):
    sample = norm_inputs(dtype, device, (5, cols), shift=1e4)
    assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


@each(torch.float32, torch.float64)
def test_a_mean_of_10000_sigma_in_a_row_of_several_blocks(dtype, cuda):
    for cols in (20480, 32769, 70001, 131072, 600000):
        sample = norm_inputs(dtype, cuda, (3, cols), shift=1e4)
        assert_norm_matches_float64(fastln.layer_norm(*sample), sample)


# --------------------------------------------------------------------------------- as F.layer_norm


def test_signature_is_that_of_torchs_own():
    ours, theirs = (inspect.signature(f).parameters.values() for f in (fastln.layer_norm, F.layer_norm))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arguments_are_taken_by_place_and_by_name(call, device):
    x, shape, weight, bias, _ = sample = norm_inputs(torch.float32, device, (5, 33), eps=0.25)
    expected = call(*sample)
    assert same_bits(call(input=x, eps=0.25, bias=bias, weight=weight, normalized_shape=shape), expected)
    assert same_bits(call(x, shape, bias=bias, weight=weight, eps=0.25), expected)
    assert same_bits(call(x, shape, None, bias), call(x, shape, bias=bias))
    assert same_bits(call(x, shape, weight), call(x, shape, weight, None, 1e-5))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_normalized_shape_may_be_a_list_a_tuple_or_a_size_and_no_number(call, device):
    sample = norm_inputs(torch.float32, device, (5, 4, 8), dims=2)
    expected = call(*sample)
    for shape in ((4, 8), torch.Size([4, 8]), sample.weight.shape):
        assert same_bits(call(*sample._replace(normalized_shape=shape)), expected)
    for function in (call, F.layer_norm):
        with pytest.raises((TypeError, RuntimeError)):
            function(sample.input, 8)


@each()
def test_agrees_with_torchs_own(dtype, device):
    """On a CPU it is torch's own; on a GPU each of the two may be off by the tolerance."""
    for shape, dims in (((5, 768), 1), ((3, 33), 1), ((4, 6, 129), 2)):
        sample = norm_inputs(dtype, device, shape, dims=dims)
        for form in (
            sample,
            sample.in_dtypes(dtype, None),
            sample.in_dtypes(None, dtype),
            sample.in_dtypes(None, None),
        ):
            ours, theirs = fastln.layer_norm(*form), F.layer_norm(*form)
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
            if device.type == "cpu":
                assert same_bits(ours, theirs)
            else:
                assert_norm_matches_float64(ours, form)
                assert_norm_matches_float64(theirs, form)


# ------------------------------------------------------------------------------------ and no more


def test_arguments_are_left_as_they_were(device):
    for dtype in ELEMENTS:
        for cols in (33, 768):
            sample = norm_inputs(dtype, device, (5, cols))
            before = [t.clone() for t in (sample.input, sample.weight, sample.bias)]
            fastln.layer_norm(*sample)
            FWD(*sample)
            assert all(same_bits(a, b) for a, b in zip((sample.input, sample.weight, sample.bias), before, strict=True))


def test_weight_and_bias_may_be_one_tensor_and_the_input_itself(device):
    row = norm_inputs(torch.float16, device, (33,)).input
    assert same_bits(
        fastln.layer_norm(row, [33], row, row), fastln.layer_norm(row.clone(), [33], row.clone(), row.clone())
    )


def test_two_threads_calling_at_once_get_their_own_results(device):
    samples = [norm_inputs(torch.float32, device, (64, 257), seed=seed) for seed in range(2)]
    assert wrong_results_of_two_threads(fastln.layer_norm, samples) == [0, 0]
