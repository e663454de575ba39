"""Bad arguments of fastln::layer_norm_bwd raise, with one text in every mode, and change nothing."""

import pytest
import torch
from bwd_support import ALL, BWD, stats, upstream
from norm_support import norm_inputs
from reference import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

FLOATING = "float16, bfloat16, float32 or float64"
NAMES = ("grad_out", "input", "mean", "rstd", "weight", "bias")


def good(device="cpu", dtype=torch.float32):
    """The arguments of a good call by name: rows of [4, 8], three of them."""
    sample = norm_inputs(dtype, device, (3, 4, 8), dims=2)
    mean, rstd = stats(sample)
    return {
        "grad_out": upstream(sample),
        "input": sample.input,
        "normalized_shape": [4, 8],
        "mean": mean,
        "rstd": rstd,
        "weight": sample.weight,
        "bias": sample.bias,
        "output_mask": list(ALL),
    }


def ones(name, shape=None, dtype=None):
    """Replaces the argument by ones of another shape or dtype."""

    def spoil(arguments):
        like = arguments[name]
        spoiled = torch.ones(like.shape if shape is None else shape, dtype=dtype or like.dtype, device=like.device)
        return arguments | {name: spoiled}

    return spoil


def instead(**values):
    return lambda arguments: arguments | values


def mistakes():
    """(id, (function that spoils good arguments, the message without the op's name))"""
    for shape in ((), (4, 8), (1, 4, 8), (3, 8, 4), (3, 32), (3, 4, 8, 1), (0, 4, 8)):
        text = f"expected grad_out of shape [3, 4, 8], got {list(shape)}"
        yield f"grad_out_of_shape_{list(shape)}", (ones("grad_out", shape), text)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.complex64):
        text = "expected grad_out of dtype float32, got " + str(dtype).removeprefix("torch.")
        yield f"grad_out_of_{dtype}", (ones("grad_out", dtype=dtype), text)
    for what in ("mean", "rstd"):
        for shape in ((), (2,), (4, 1, 1), (3, 4, 8), (0,)):
            text = f"expected {what} of 3 elements, one a row, got {torch.Size(shape).numel()}"
            yield f"{what}_of_shape_{list(shape)}", (ones(what, shape), text)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64):
            text = f"expected {what} of dtype float32, got " + str(dtype).removeprefix("torch.")
            yield f"{what}_of_{dtype}", (ones(what, dtype=dtype), text)
    for what in ("weight", "bias"):
        for shape in ((), (32,), (8, 4), (1, 4, 8)):
            text = f"expected {what} of shape [4, 8], got {list(shape)}"
            yield f"{what}_of_shape_{list(shape)}", (ones(what, shape), text)
        for dtype in (torch.int64, torch.bool, torch.complex64):
            text = f"expected {what} of dtype {FLOATING}, got " + str(dtype).removeprefix("torch.")
            yield f"{what}_of_{dtype}", (ones(what, dtype=dtype), text)
    text = f"expected input of dtype {FLOATING}, got int64"
    yield "input_of_int64", (ones("input", dtype=torch.int64), text)
    for shape in ([8, 4], [4], [3, 4], [2, 3, 4, 8], [-1]):
        text = f"expected input whose last dimensions are normalized_shape {shape}, got shape [3, 4, 8]"
        yield f"normalized_shape_{shape}", (instead(normalized_shape=shape), text)
    text = "expected normalized_shape of at least 1 dimension, got []"
    yield "normalized_shape_of_no_dimension", (instead(normalized_shape=[]), text)
    for mask in ([], [True, False], [True] * 4):
        text = f"expected output_mask of 3 booleans, got {len(mask)}"
        yield f"output_mask_of_{len(mask)}", (instead(output_mask=mask), text)


MISTAKES = dict(mistakes())

# One of each kind, for what does not vary within it.
KINDS = (
    *("grad_out_of_shape_[4, 8]", "grad_out_of_torch.float16", "mean_of_shape_[2]", "rstd_of_torch.float64"),
    *("weight_of_shape_[32]", "bias_of_torch.bool", "input_of_int64", "normalized_shape_[4]", "output_mask_of_2"),
)


def refusal(arguments, call=BWD):
    with pytest.raises(RuntimeError) as caught:
        call(*arguments.values())
    return str(caught.value)


def with_tensors(arguments, change):
    return {name: change(a) if isinstance(a, torch.Tensor) else a for name, a in arguments.items()}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_one_text_in_eager_fake_and_meta(mistake, device):
    spoil, text = MISTAKES[mistake]
    arguments = spoil(good(device))
    with FakeTensorMode() as mode:
        fake = with_tensors(arguments, mode.from_tensor)
    assert refusal(arguments) == f"fastln::layer_norm_bwd: {text}"
    assert refusal(fake) == f"fastln::layer_norm_bwd: {text}"
    assert refusal(with_tensors(arguments, lambda t: t.to("meta"))) == f"fastln::layer_norm_bwd: {text}"


@pytest.mark.parametrize("mistake", KINDS)
def test_compiled_code_refuses_a_mistake_with_the_same_text(mistake, fresh_compiler):
    spoil, text = MISTAKES[mistake]
    compiled = torch.compile(lambda *arguments: BWD(*arguments), fullgraph=True, backend="aot_eager")
    assert f"fastln::layer_norm_bwd: {text}" in refusal(spoil(good()), compiled)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_statistics_are_those_of_the_inputs_dtype(dtype, device):
    wide, other = ("float32", torch.float64) if dtype == torch.float16 else ("float64", torch.float32)
    arguments = good(device, dtype)
    arguments["rstd"] = arguments["rstd"].to(other)
    got = str(other).removeprefix("torch.")
    assert refusal(arguments) == f"fastln::layer_norm_bwd: expected rstd of dtype {wide}, got {got}"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "input"])
def test_a_tensor_on_meta_is_refused_beside_an_input_on_a_cpu(name):
    arguments = good()
    arguments[name] = arguments[name].to("meta")
    assert refusal(arguments) == f"fastln::layer_norm_bwd: expected {name} on cpu, got meta"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "input"])
@pytest.mark.parametrize(("ours", "theirs"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_refuses_a_tensor_on_another_device(name, ours, theirs, cuda):
    arguments = good(ours)
    arguments[name] = arguments[name].to(theirs)
    assert refusal(arguments) == f"fastln::layer_norm_bwd: expected {name} on {ours}, got {theirs}"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "input"])
@pytest.mark.parametrize(("ours", "theirs"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_fakes_refuse_a_tensor_on_another_device(name, ours, theirs):
    """Fake tensors have a device without a GPU, so that this runs everywhere."""
    with FakeTensorMode():
        arguments = good(ours)
        arguments[name] = torch.empty_like(arguments[name], device=theirs)
        assert refusal(arguments) == f"fastln::layer_norm_bwd: expected {name} on {ours}, got {theirs}"


def test_a_refusal_leaves_the_next_call_right(device):
    arguments = good(device)
    expected = BWD(*arguments.values())
    for spoil, _ in MISTAKES.values():
        refusal(spoil(arguments))
    assert all(same_bits(a, b) for a, b in zip(BWD(*arguments.values()), expected, strict=True))
