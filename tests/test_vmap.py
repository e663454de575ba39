"""torch.func.vmap of our ops, without a derivative: the bits of one call a slice, and no warning."""

import warnings

import pytest
import torch
from norm_support import FWD
from reference import same_bits
from shared import OpLog
from torch.func import vmap

import fastln

SLICES, ROWS, COLS = 4, 3, 24


def normed(x, weight, bias):
    return fastln.layer_norm(x, [COLS], weight, bias)


def with_statistics(x, weight, bias):
    return FWD(x, [COLS], weight, bias, 1e-5)


def named(x, weight, bias):
    return fastln.KERNELS[-1].op(x.half(), weight.half(), bias.half())


def scalar(x, weight, bias):
    return fastln.KERNELS[-1].op.scalar(x.half(), 2.0, 1.0)


FUNCTIONS = {f.__name__: f for f in (normed, with_statistics, named, scalar)}
#: Which dimension of input, weight and bias is the batch.
IN_DIMS = [
    (0, None, None),
    (1, None, None),
    (-2, None, None),
    (0, 0, 0),
    (1, 1, None),
    (None, 0, None),
    (None, None, 1),
]

by_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        yield


def arguments(in_dims, device, slices=SLICES):
    torch.manual_seed(0)
    made = []
    for shape, dim in zip(([ROWS, COLS], [COLS], [COLS]), in_dims, strict=True):
        t = torch.randn(*shape if dim is None else (slices, *shape), device=device)
        made.append(t if dim is None else t.movedim(0, dim))
    return made


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


@by_function
@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_each_slice_has_the_bits_of_a_call_of_its_own(function, in_dims, device):
    if function is scalar and in_dims[0] is None:
        pytest.skip("it has no other tensor")
    batch = arguments(in_dims, device)
    got = outputs(vmap(function, in_dims)(*batch))
    for i in range(SLICES):
        alone = outputs(
            function(*(t if dim is None else t.select(dim, i) for t, dim in zip(batch, in_dims, strict=True)))
        )
        for whole, part in zip(got, alone, strict=True):
            assert same_bits(whole[i], part)


@by_function
def test_nested_batches(function, device):
    x, weight, bias = (torch.randn(*sizes, COLS, device=device) for sizes in ((2, 5, ROWS), (5,), ()))
    inner = vmap(function, (0, 0, None))
    got = outputs(vmap(inner, (0, None, None))(x, weight, bias))
    for whole, part in zip(got, outputs(inner(x[1], weight, bias)), strict=True):
        assert same_bits(whole[1], part)


@by_function
@pytest.mark.parametrize("in_dims", [(0, None, None), (0, 0, None)], ids=str)
def test_a_batch_of_nothing(function, in_dims, device):
    got = outputs(vmap(function, in_dims)(*arguments(in_dims, device, slices=0)))
    for whole, part in zip(got, outputs(function(*arguments((None,) * 3, device))), strict=True):
        assert (whole.shape, whole.dtype) == ((0, *part.shape), part.dtype)


def test_a_batch_of_inputs_is_one_call(device):
    x, weight, bias = arguments((0, None, None), device)
    with OpLog() as log:
        vmap(normed, (0, None, None))(x, weight, bias)
    assert log.seen == ["layer_norm"]


def test_a_refusal_keeps_its_words(device):
    x, _, bias = arguments((0, None, None), device)
    with pytest.raises(RuntimeError, match=r"expected weight of shape \[24\], got \[23\]"):
        vmap(lambda t: normed(t, bias[1:], bias))(x)


BWD = torch.ops.fastln.layer_norm_bwd


def backward(dy, x, weight, bias, mask):
    _, mean, rstd = FWD(x, [COLS], weight, bias, 1e-5)
    return tuple(t for t in BWD(dy, x, [COLS], mean, rstd, weight, bias, mask) if t is not None)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, True], [True, True, True]], ids=str)
@pytest.mark.parametrize(
    "in_dims", [(0, 0, None, None), (1, 0, None, None), (0, None, None, None), (None, 1, None, None), (0, 0, 0, 0)]
)
@pytest.mark.parametrize("slices", [SLICES, 0])
def test_a_backward_of_each_slice_has_the_bits_of_a_call_of_its_own(slices, in_dims, mask, device):
    torch.manual_seed(0)
    batch = []
    for shape, dim in zip(([ROWS, COLS], [ROWS, COLS], [COLS], [COLS]), in_dims, strict=True):
        t = torch.randn(*shape if dim is None else (slices, *shape), device=device)
        batch.append(t if dim is None else t.movedim(0, dim))
    got = vmap(lambda *tensors: backward(*tensors, mask), in_dims)(*batch)
    assert all(len(t) == slices for t in got)
    for i in range(slices):
        alone = (t if dim is None else t.select(dim, i) for t, dim in zip(batch, in_dims, strict=True))
        for whole, part in zip(got, backward(*alone, mask), strict=True):
            assert same_bits(whole[i], part)


def test_the_input_gradient_of_a_batch_is_one_call(device):
    x, weight, bias = arguments((0, None, None), device)
    with OpLog() as log:
        vmap(lambda x: backward(x, x, weight, bias, [True, False, False]))(x)
    assert log.seen == ["layer_norm_fwd", "layer_norm_bwd"]
