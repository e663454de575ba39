"""Bad arguments of fastln.layer_norm raise, with one text in every mode, and change nothing."""

from collections import UserList

import numpy as np
import pytest
import torch
from norm_support import CALLS, FWD, Norm, norm_inputs
from reference import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import fastln

ROWS, SHAPE = 3, [4, 8]
FLOATING = "float16, bfloat16, float32 or float64"
EVERY_CALL = {**CALLS, "fwd": FWD}


def named(call):
    """The op that a message of this call begins with."""
    return "fastln::layer_norm_fwd" if call is FWD else "fastln::layer_norm"


#: FakeTensorMode asks CUDA for a device, where there is CUDA.
TWO_GPUS = pytest.param(
    *("cuda:0", "cuda:1"),
    marks=pytest.mark.skipif(torch.cuda.device_count() == 1, reason="one GPU: torch refuses to name a second"),
)


def good(device="cpu", dtype=torch.float32):
    return norm_inputs(dtype, device, (ROWS, *SHAPE), dims=2)


def ones(like, shape=None, dtype=None):
    return torch.ones(like.shape if shape is None else shape, dtype=dtype or like.dtype, device=like.device)


def wrong_shapes(name):
    for shape in ((), (8,), (4, 7), (5, 8), (8, 4), (32,), (1, 8), (4, 1), (1, 4, 8), (0, 8)):
        yield (
            f"{name}_of_shape_{list(shape)}",
            (
                lambda s, shape=shape: s._replace(**{name: ones(getattr(s, name), shape)}),
                f"expected {name} of shape [4, 8], got {list(shape)}",
            ),
        )


def wrong_dtypes(name):
    integers = (torch.int64, torch.int32, torch.uint8, torch.uint16, torch.bool)
    for dtype in (*integers, torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        yield (
            f"{name}_of_{dtype}",
            (
                lambda s, dtype=dtype: s._replace(**{name: ones(getattr(s, name)).to(dtype)}),
                f"expected {name} of dtype {FLOATING}, got " + str(dtype).removeprefix("torch."),
            ),
        )


def wrong_normalized_shapes():
    for shape in ([8, 4], [4, 9], [7], [3, 4], [32], [1, 4, 8], [2, 3, 4, 8], [0], [-1], [4, -1]):
        text = f"expected input whose last dimensions are normalized_shape {shape}, got shape [3, 4, 8]"
        yield f"normalized_shape_{shape}", (lambda s, shape=shape: s._replace(normalized_shape=shape), text)
    yield (
        "normalized_shape_of_no_dimension",
        (lambda s: s._replace(normalized_shape=[]), "expected normalized_shape of at least 1 dimension, got []"),
    )


def wrong_inputs():
    for shape in ((), (8,), (3, 8, 4), (3, 4), (4, 8, 3)):
        text = f"expected input whose last dimensions are normalized_shape [4, 8], got shape {list(shape)}"
        yield f"input_of_shape_{list(shape)}", (lambda s, shape=shape: s.of(ones(s.input, shape)), text)


# name: (function that spoils a good Norm, the message without the op's name)
MISTAKES = {
    **dict(wrong_dtypes("input")),
    **dict(wrong_inputs()),
    **dict(wrong_normalized_shapes()),
    **dict(wrong_shapes("weight")),
    **dict(wrong_shapes("bias")),
    **dict(wrong_dtypes("weight")),
    **dict(wrong_dtypes("bias")),
}

# One of each kind, for what does not vary within it.
KINDS = (
    *("input_of_torch.int64", "input_of_shape_[3, 4]", "normalized_shape_[7]", "normalized_shape_of_no_dimension"),
    *("weight_of_shape_[4, 7]", "weight_of_torch.bool", "bias_of_shape_[]", "bias_of_torch.int32"),
)


def refusal(call, sample):
    with pytest.raises(RuntimeError) as caught:
        call(*sample)
    return str(caught.value)


def with_tensors(sample, change):
    """The sample with `change` applied to each tensor."""
    return Norm(*(change(value) if isinstance(value, torch.Tensor) else value for value in sample))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_one_text_in_eager_fake_and_meta(mistake, device):
    spoil, text = MISTAKES[mistake]
    sample = spoil(good(device))
    with FakeTensorMode() as mode:
        fake = with_tensors(sample, mode.from_tensor)
    for call in EVERY_CALL.values():
        assert refusal(call, sample) == f"{named(call)}: {text}"
        assert refusal(call, fake) == f"{named(call)}: {text}"
        with mode:
            assert refusal(call, fake) == f"{named(call)}: {text}"
        assert refusal(call, with_tensors(sample, lambda t: t.to("meta"))) == f"{named(call)}: {text}"


@pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
@pytest.mark.parametrize("mistake", KINDS)
def test_compiled_code_refuses_a_mistake_with_the_same_text(call, mistake, fresh_compiler):
    spoil, text = MISTAKES[mistake]
    sample = spoil(good())
    compiled = torch.compile(lambda *arguments: call(*arguments), fullgraph=True, backend="aot_eager")
    assert f"{named(call)}: {text}" in refusal(compiled, sample)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_message_is_one_clean_line_in_every_grad_mode_and_nothing_is_printed(mode, requires_grad, device, capfd):
    for mistake in KINDS:
        spoil, text = MISTAKES[mistake]
        sample = spoil(good(device))
        for t in (sample.input, sample.weight, sample.bias):
            t.requires_grad_(requires_grad and t.is_floating_point())
        for call in CALLS.values():
            with mode():
                assert refusal(call, sample) == f"{named(call)}: {text}"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
@pytest.mark.parametrize("mistake", KINDS)
def test_fakes_and_compiled_code_refuse_a_mistake_with_the_same_text_in_training(call, mistake, fresh_compiler):
    spoil, text = MISTAKES[mistake]
    sample = with_tensors(spoil(good()), lambda t: t.requires_grad_(t.is_floating_point()))
    with FakeTensorMode() as mode:
        fake = with_tensors(sample, mode.from_tensor)
        assert refusal(call, fake) == f"{named(call)}: {text}"
    assert refusal(call, fake) == f"{named(call)}: {text}"
    compiled = torch.compile(lambda *arguments: call(*arguments), fullgraph=True, backend="aot_eager")
    assert f"{named(call)}: {text}" in refusal(compiled, sample)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
def test_a_parameter_on_meta_is_refused_beside_an_input_on_a_cpu(call, name):
    sample = good()
    message = refusal(call, sample._replace(**{name: getattr(sample, name).to("meta")}))
    assert message == f"{named(call)}: expected {name} on cpu, got meta"


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(("ours", "theirs"), [("cuda:0", "cpu"), ("cpu", "cuda:0"), TWO_GPUS])
def test_fakes_refuse_a_parameter_on_another_device(name, ours, theirs):
    """Fake tensors have a device without a GPU, so that this runs everywhere."""
    with FakeTensorMode():
        sample = good(ours)
        sample = sample._replace(**{name: torch.empty_like(getattr(sample, name), device=theirs)})
        for call in EVERY_CALL.values():
            assert refusal(call, sample) == f"{named(call)}: expected {name} on {ours}, got {theirs}"


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(("ours", "theirs"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_refuses_a_parameter_on_another_device(name, ours, theirs, cuda):
    sample = good(ours)
    for call in EVERY_CALL.values():
        message = refusal(call, sample._replace(**{name: getattr(sample, name).to(theirs)}))
        assert message == f"{named(call)}: expected {name} on {ours}, got {theirs}"


@pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
def test_refuses_a_weight_on_another_gpu(call, second_cuda):
    sample = good("cuda:0")
    message = refusal(call, sample._replace(weight=sample.weight.to(second_cuda)))
    assert message == f"{named(call)}: expected weight on cuda:0, got cuda:1"


@pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
def test_a_refusal_leaves_the_next_call_right(call, device):
    def outputs(*sample):
        result = call(*sample)
        return result if isinstance(result, tuple) else (result,)

    sample = good(device)
    expected = outputs(*sample)
    for spoil, _ in MISTAKES.values():
        refusal(call, spoil(sample))
    assert all(same_bits(a, b) for a, b in zip(outputs(*sample), expected, strict=True))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch before 2.13 keeps no text of its errors")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
def test_out_of_memory_is_told_in_the_words_of_torch(call, mode, device):
    """By which programs that then try a smaller batch know it."""
    x = torch.zeros(1, device=device).expand(2**44, 8)
    message = "out of memory|can't allocate memory"
    with mode(), pytest.raises(RuntimeError, match=message):
        call(x, [8], None, None, 1e-5)


# ------------------------------------------------------------------------------------------- types

WRONG_TYPES = {
    "input_of_numbers": ({"input": [1.0, 2.0]}, "expected input to be a Tensor, got list"),
    "no_input": ({"input": None}, "expected input to be a Tensor, got NoneType"),
    "weight_a_number": ({"weight": 1.0}, "expected weight to be a Tensor or None, got float"),
    "bias_of_numbers": ({"bias": [0.0]}, "expected bias to be a Tensor or None, got list"),
    "normalized_shape_an_int": ({"normalized_shape": 8}, "expected normalized_shape to be a sequence of ints, got int"),
    "normalized_shape_a_text": (
        {"normalized_shape": "8"},
        "expected normalized_shape to be a sequence of ints, got str",
    ),
    "normalized_shape_of_floats": (
        {"normalized_shape": [4, 8.0]},
        "expected each item of normalized_shape to be an int, got float",
    ),
    **{
        f"normalized_shape_a_{type(shape).__name__}": (
            {"normalized_shape": shape},
            f"expected normalized_shape to be a sequence of ints, got {type(shape).__name__}",
        )
        for shape in ({4, 8}, {4: 1, 8: 1}, range(4, 9, 4), np.array([4, 8]), torch.tensor([4, 8]), UserList([4, 8]))
    },
    "normalized_shape_of_bools": (
        {"normalized_shape": [True, True]},
        "expected each item of normalized_shape to be an int, got bool",
    ),
    "normalized_shape_of_a_float_tensor": (
        {"normalized_shape": [torch.tensor(4.0), 8]},
        "expected each item of normalized_shape to be an int, got Tensor",
    ),
    "eps_a_text": ({"eps": "1e-5"}, "expected eps to be a float, got str"),
    "eps_none": ({"eps": None}, "expected eps to be a float, got NoneType"),
    "eps_complex": ({"eps": 1j}, "expected eps to be a float, got complex"),
    "eps_an_array": ({"eps": np.array(1e-5)}, "expected eps to be a float, got ndarray"),
    "eps_of_two_numbers": ({"eps": torch.ones(2)}, "expected eps to be a float, got Tensor"),
    "eps_that_requires_grad": (
        {"eps": torch.tensor(1e-5, requires_grad=True)},
        "expected eps to be a float, got Tensor",
    ),
}
# What Dynamo traces arrays as it tells by their type.
NOT_COMPILED = ("eps_an_array", "normalized_shape_a_ndarray")


@pytest.mark.parametrize("mode", ["plain", "grad", "func", "compiled", "fake"])
@pytest.mark.parametrize("name", WRONG_TYPES)
def test_types_that_it_does_not_take_are_refused_by_name(name, mode, device):
    if mode == "compiled" and name in NOT_COMPILED:
        pytest.skip("Dynamo has another type for it")
    if mode == "fake" and name == "normalized_shape_a_Tensor":
        pytest.skip("torch itself looks into it")
    changed, text = WRONG_TYPES[name]
    arguments = good(device)._replace(**changed)
    if mode == "grad" and isinstance(arguments.bias, torch.Tensor):
        arguments.bias.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(fastln.layer_norm, backend="eager")
    transformed = torch.func.functionalize(lambda _: fastln.layer_norm(*arguments))
    with pytest.raises(TypeError) as caught:
        if mode == "compiled":
            compiled(*arguments)
        elif mode == "func":
            transformed(torch.zeros(1))
        elif mode == "fake":
            with FakeTensorMode() as fake:
                fastln.layer_norm(*with_tensors(good(device), fake.from_tensor)._replace(**changed))
        else:
            fastln.layer_norm(*arguments)
    assert str(caught.value) == f"fastln::layer_norm: {text}"


TOO_LARGE = {
    "normalized_shape": (
        {"normalized_shape": [4, 2**63]},
        f"expected input whose last dimensions are normalized_shape [4, {2**63}], got shape [3, 4, 8]",
    ),
    "eps": ({"eps": 10**400}, "expected eps within the range of a float, got an int of 1329 bits"),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", TOO_LARGE)
def test_numbers_that_no_op_can_take_are_refused_by_the_public_name(name, requires_grad, device):
    changed, text = TOO_LARGE[name]
    arguments = good(device)._replace(**changed)
    arguments.weight.requires_grad_(requires_grad)
    assert refusal(fastln.layer_norm, arguments) == f"fastln::layer_norm: {text}"


class Sizes(list):
    pass


TAKEN = {
    "tuple": {"normalized_shape": (4, 8)},
    "torch_size": {"normalized_shape": torch.Size((4, 8))},
    "list_of_a_kind": {"normalized_shape": Sizes([4, 8])},
    "numpy_ints": {"normalized_shape": [np.int64(4), np.int32(8)]},
    "tensors_of_one_int": {"normalized_shape": [torch.tensor(4), torch.tensor(8)]},
    "eps_an_int": {"eps": 1},
    "eps_a_bool": {"eps": True},
    "eps_a_numpy_double": {"eps": np.float64(0.5)},
    "eps_a_numpy_float": {"eps": np.float32(0.5)},
    "eps_a_tensor_of_one_number": {"eps": torch.tensor(0.5, dtype=torch.float64)},
}


@pytest.mark.parametrize("mode", ["plain", "grad", "grad_transform", "fake"])
@pytest.mark.parametrize("name", TAKEN)
def test_what_f_layer_norm_takes_for_ints_and_floats_is_taken(name, mode, device):
    sample = good(device)._replace(**TAKEN[name])
    plain = Norm(sample.input, [4, 8], sample.weight, sample.bias, float(sample.eps))
    if mode == "fake":
        if "tensor" in name:
            pytest.skip("a fake mode reads no number from a tensor")
        with FakeTensorMode() as fake:
            assert fastln.layer_norm(*with_tensors(good(device), fake.from_tensor)._replace(**TAKEN[name])).shape
        return
    if mode == "grad_transform":

        def gradient(arguments):
            return torch.func.grad(lambda x: fastln.layer_norm(*arguments.of(x)).pow(3).sum())(arguments.input)

        assert same_bits(gradient(sample), gradient(plain))
        return
    sample.weight.requires_grad_(mode == "grad")
    assert same_bits(fastln.layer_norm(*sample).detach(), fastln.layer_norm(*plain).detach())
