"""Bad arguments raise, name what was expected and what came, read the same in every mode, and change nothing."""

import re
from typing import NamedTuple

import pytest
import torch
from reference import call, good_arguments, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

ROWS, COLS = 3, 8

#: FakeTensorMode asks CUDA for a device, where there is CUDA.
TWO_GPUS = pytest.param(
    *("cuda:0", "cuda:1"),
    marks=pytest.mark.skipif(torch.cuda.device_count() == 1, reason="one GPU: torch refuses to name a second"),
)


def scrambled(shape, dtype):
    """A function that replaces a tensor by one of another shape (unless None) and dtype (unless None)."""
    return lambda t: torch.ones(t.shape if shape is None else shape, dtype=dtype or t.dtype, device=t.device)


class Mistake(NamedTuple):
    """`argument` of an otherwise good call, spoiled; the message must hold all of `pieces`."""

    argument: str
    spoil: object
    pieces: tuple[str, ...]


def shape_mistakes(name):
    for wrong in ((COLS - 1,), (COLS + 1,), (1,), (0,), (1, COLS), (COLS, 1), ()):
        yield (
            f"{name}_of_shape_{list(wrong)}",
            Mistake(name, scrambled(wrong, None), (f"{name} of shape [{COLS}]", str(list(wrong)))),
        )


def dtype_mistakes(name, dtypes):
    for dtype in dtypes:
        text = str(dtype).removeprefix("torch.")
        yield f"{name}_of_{text}", Mistake(name, scrambled(None, dtype), (f"{name} of dtype {{element}}", text))


NEVER_ACCEPTED = (torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.complex64)

BAD_ARGUMENTS = {
    **dict(dtype_mistakes("input", NEVER_ACCEPTED)),
    "input_of_no_dimension": Mistake("input", scrambled((), None), ("input", "at least 1 dimension", "0")),
    **dict(shape_mistakes("weight")),
    **dict(shape_mistakes("bias")),
    **dict(dtype_mistakes("weight", NEVER_ACCEPTED)),
    **dict(dtype_mistakes("bias", NEVER_ACCEPTED)),
}
BAD_OUT = {
    "out_with_more_rows": Mistake("out", scrambled((ROWS + 1, COLS), None), ("out of shape [3, 8]", "[4, 8]")),
    "out_with_fewer_cols": Mistake("out", scrambled((ROWS, COLS - 1), None), ("out of shape [3, 8]", "[3, 7]")),
    "out_of_other_rank": Mistake("out", scrambled((ROWS * COLS,), None), ("out of shape [3, 8]", "[24]")),
    "out_of_no_dimension": Mistake("out", scrambled((), None), ("out of shape [3, 8]", "[]")),
    **dict(dtype_mistakes("out", NEVER_ACCEPTED)),
    "out_transposed": Mistake("out", lambda t: torch.ones_like(t).t().contiguous().t(), ("contiguous", "[1, 3]")),
    "out_row_strided": Mistake("out", lambda t: torch.ones_like(t).repeat(1, 2)[:, :COLS], ("contiguous", "[16, 1]")),
    "out_expanded": Mistake("out", lambda t: torch.ones_like(t[:1]).expand(t.shape), ("contiguous", "[0, 1]")),
}
ALL = {**BAD_ARGUMENTS, **BAD_OUT}


def spoiled(arguments, mistake):
    return {**arguments, mistake.argument: mistake.spoil(arguments[mistake.argument])}


def refusal(kernel, action, *arguments):
    """What the RuntimeError says, from the op's name on to what came: the part that reads the same in
    every mode (torch.compile puts its own words around it)."""
    with pytest.raises(RuntimeError) as caught:
        action(*arguments)
    expected_and_got = r": expected [^\n]*?, got (?:[a-z]+ )*(?:\[[^\]\n]*\]|[\w:]+)"
    found = re.search(re.escape(kernel.qualname) + expected_and_got, str(caught.value))
    assert found, f"not a refusal by the op: {caught.value!r}"
    return found.group()


def assert_names_the_mistake(kernel, mistake, message):
    for piece in mistake.pieces:
        assert piece.format(element=kernel.element) in message


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_input_weight_or_bias_is_refused(kernel, name, device):
    mistake = BAD_ARGUMENTS[name]
    arguments = spoiled(good_arguments(kernel, device, (ROWS, COLS)), mistake)
    assert_names_the_mistake(kernel, mistake, refusal(kernel, call, kernel, arguments))
    if mistake.argument == "input":
        assert_names_the_mistake(kernel, mistake, refusal(kernel, kernel.op.scalar, arguments["input"], 1.0, 0.0))


@pytest.mark.parametrize("name", ALL)
def test_a_refused_out_call_leaves_out_as_it_was(kernel, name, device):
    arguments = spoiled(good_arguments(kernel, device, (ROWS, COLS), out=True), ALL[name])
    out = arguments["out"]
    before, version = out.clone(), out._version
    assert_names_the_mistake(kernel, ALL[name], refusal(kernel, call, kernel, arguments))
    assert torch.equal(out, before)
    assert out._version == version


def test_the_other_kernels_element_type_is_refused(kernel, device):
    other = {"float32": torch.float16, "float16": torch.float32}[kernel.element]
    good = good_arguments(kernel, device, (ROWS, COLS), out=True)
    # float32 weight and bias are accepted by every kernel.
    for name in ("input", "out", *(("weight", "bias") if kernel.element == "float32" else ())):
        message = refusal(kernel, call, kernel, spoiled(good, Mistake(name, scrambled(None, other), ())))
        assert f"{name} of dtype {kernel.element}" in message
        assert message.endswith(f"got {str(other).removeprefix('torch.')}")
    assert (good["out"] == 7.0).all()


@pytest.mark.parametrize("name", ALL)
def test_fakes_refuse_the_same_with_the_same_words(kernel, name):
    arguments = spoiled(good_arguments(kernel, "cpu", (ROWS, COLS), out=True), ALL[name])
    eager = refusal(kernel, call, kernel, arguments)
    with FakeTensorMode() as mode:
        fake = {key: mode.from_tensor(value) for key, value in arguments.items()}
        assert refusal(kernel, call, kernel, fake) == eager
    on_meta = {key: value.to("meta") for key, value in arguments.items() if key != "out"}
    if ALL[name].argument != "out":
        assert refusal(kernel, call, kernel, on_meta) == eager


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_message_is_one_clean_line_in_every_grad_mode_and_nothing_is_printed(kernel, mode, device, capfd):
    good = good_arguments(kernel, device, (ROWS, COLS), out=True)
    for name in ("input_of_float64", "input_of_no_dimension", "weight_of_shape_[1]", "bias_of_int64", "out_transposed"):
        arguments = spoiled(good, ALL[name])
        with mode():
            with pytest.raises(RuntimeError) as caught:
                call(kernel, arguments)
            assert str(caught.value) == refusal(kernel, call, kernel, arguments)
    assert capfd.readouterr() == ("", "")


@pytest.mark.kernels(items=8, access=8, accumulate="float32")
@pytest.mark.parametrize("name", ALL)
def test_compiled_code_refuses_the_same_with_the_same_words(kernel, name, fresh_compiler):
    arguments = spoiled(good_arguments(kernel, "cpu", (ROWS, COLS), out=True), ALL[name])
    eager = refusal(kernel, call, kernel, arguments)
    compiled = torch.compile(lambda a: call(kernel, a), fullgraph=True, backend="aot_eager")
    assert refusal(kernel, compiled, arguments) == eager


def test_every_kernel_refuses_when_compiled(kernel, fresh_compiler):
    arguments = spoiled(good_arguments(kernel, "cpu", (ROWS, COLS)), ALL["weight_of_shape_[7]"])
    compiled = torch.compile(lambda a: call(kernel, a), fullgraph=True, backend="aot_eager")
    assert refusal(kernel, compiled, arguments) == refusal(kernel, call, kernel, arguments)


@pytest.mark.parametrize("argument", ["weight", "bias", "out"])
def test_rejects_an_argument_on_meta_with_cpu_input(kernel, argument):
    arguments = good_arguments(kernel, "cpu", (ROWS, COLS), out=argument == "out")
    message = refusal(kernel, call, kernel, {**arguments, argument: arguments[argument].to("meta")})
    assert_names_the_mistake(kernel, Mistake(argument, None, (f"{argument} on cpu", "got meta")), message)


@pytest.mark.parametrize("argument", ["weight", "bias", "out"])
@pytest.mark.parametrize(("ours", "theirs"), [("cuda:0", "cpu"), ("cpu", "cuda:0"), TWO_GPUS])
def test_fakes_reject_an_argument_on_another_device(kernel, argument, ours, theirs):
    """Fake tensors have a device without a GPU, so that this runs everywhere."""
    with FakeTensorMode():
        arguments = good_arguments(kernel, ours, (ROWS, COLS), out=argument == "out")
        arguments[argument] = torch.empty_like(arguments[argument], device=theirs)
        message = refusal(kernel, call, kernel, arguments)
    assert message == f"{kernel.qualname}: expected {argument} on {ours}, got {theirs}"


def on_cuda(kernel, *names, out=False):
    """Good arguments of which those in `names` are on the GPU and the others on the CPU."""
    arguments = good_arguments(kernel, "cpu", (ROWS, COLS), out=out)
    return {name: t.to("cuda:0") if name in names else t for name, t in arguments.items()}


def test_rejects_cpu_weight_with_cuda_input(kernel, cuda):
    message = refusal(kernel, call, kernel, on_cuda(kernel, "input", "bias"))
    assert message == f"{kernel.qualname}: expected weight on cuda:0, got cpu"


def test_rejects_cpu_bias_with_cuda_input(kernel, cuda):
    message = refusal(kernel, call, kernel, on_cuda(kernel, "input", "weight"))
    assert message == f"{kernel.qualname}: expected bias on cuda:0, got cpu"


def test_rejects_cuda_weight_with_cpu_input(kernel, cuda):
    message = refusal(kernel, call, kernel, on_cuda(kernel, "weight"))
    assert message == f"{kernel.qualname}: expected weight on cpu, got cuda:0"


def test_rejects_cpu_out_with_cuda_input(kernel, cuda):
    message = refusal(kernel, call, kernel, on_cuda(kernel, "input", "weight", "bias", out=True))
    assert message == f"{kernel.qualname}: expected out on cuda:0, got cpu"


def test_rejects_weight_on_another_gpu(kernel, second_cuda):
    arguments = good_arguments(kernel, "cuda:0", (ROWS, COLS))
    arguments["weight"] = arguments["weight"].to(second_cuda)
    assert refusal(kernel, call, kernel, arguments) == f"{kernel.qualname}: expected weight on cuda:0, got cuda:1"


def test_a_refusal_leaves_the_next_call_right(kernel, device):
    arguments = good_arguments(kernel, device, (ROWS, COLS))
    expected = call(kernel, arguments)
    refusal(kernel, call, kernel, spoiled(arguments, ALL["weight_of_float64"]))
    assert same_bits(call(kernel, arguments), expected)


# ----------------------------------------------------------------------------------------------- layouts

NESTED = "expected tensors that are not nested, got a nested one"
OTHER_LAYOUTS = {
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.to_sparse_csr() if t.dim() == 2 else t.to_sparse(),
    "_mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
}
GRAD_OR_NOT = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
EVERY_OTHER_LAYOUT = pytest.mark.parametrize("layout", OTHER_LAYOUTS)


def in_other_layout(name, layout, t):
    """A tensor of that layout, and what refuses it as the argument of that name."""
    other = OTHER_LAYOUTS[layout](t)
    if layout in ("nested", "jagged"):
        return other, NESTED
    return other, f"expected {name} of layout strided, got {str(other.layout).removeprefix('torch.')}"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.kernels(element="float32")
@GRAD_OR_NOT
@EVERY_OTHER_LAYOUT
def test_tensors_of_another_layout_are_refused_by_name(kernel, layout, mode, capfd):
    good = good_arguments(kernel, "cpu", (ROWS, COLS), out=True)
    with mode():
        for name in good:
            other, text = in_other_layout(name, layout, good[name])
            overloads = [lambda a: call(kernel, a)]
            if name != "out":
                overloads.append(lambda a: kernel.op(a["input"], a["weight"], a["bias"]))
            if name == "input":
                overloads.append(lambda a: kernel.op.scalar(a["input"], 2.0, 1.0))
            for overload in overloads:
                with pytest.raises(RuntimeError) as caught:
                    overload({**good, name: other})
                assert str(caught.value) == f"{kernel.qualname}: {text}"
    assert (good["out"] == 7.0).all()
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@GRAD_OR_NOT
@EVERY_OTHER_LAYOUT
def test_the_general_ops_refuse_tensors_of_another_layout_by_name(layout, mode, capfd):
    general = {"input": torch.randn(ROWS, COLS), "weight": torch.randn(COLS), "bias": torch.randn(COLS)}
    stats = {"mean": torch.zeros(ROWS, 1), "rstd": torch.ones(ROWS, 1)}
    ops = torch.ops.fastln
    calls = {
        "layer_norm": (general, lambda a: ops.layer_norm(a["input"], [COLS], a["weight"], a["bias"])),
        "layer_norm_fwd": (general, lambda a: ops.layer_norm_fwd(a["input"], [COLS], a["weight"], a["bias"], 1e-5)),
        "layer_norm_bwd": (
            {"grad_out": torch.randn(ROWS, COLS), **general, **stats},
            lambda a: ops.layer_norm_bwd(
                *(a["grad_out"], a["input"], [COLS], a["mean"], a["rstd"], a["weight"], a["bias"], [True] * 3)
            ),
        ),
    }
    with mode():
        for op, (good, run) in calls.items():
            run(good)
            for name in good:
                other, text = in_other_layout(name, layout, good[name])
                with pytest.raises(RuntimeError) as caught:
                    run({**good, name: other})
                assert str(caught.value) == f"fastln::{op}: {text}"
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------- names


FWD_REFUSAL = r"^fastln::layer_norm_fwd: expected weight of shape \[8\], got \[7\]$"


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_layer_norm_fwd_refuses_under_its_own_name(mode, device):
    x, weight = torch.randn(ROWS, COLS, device=device), torch.randn(COLS - 1, device=device)
    with mode(), pytest.raises(RuntimeError, match=FWD_REFUSAL):
        torch.ops.fastln.layer_norm_fwd(x, [COLS], weight, None, 1e-5)


def test_the_fake_of_layer_norm_fwd_refuses_under_that_name_too():
    x, weight = torch.empty(ROWS, COLS, device="meta"), torch.empty(COLS - 1, device="meta")
    with pytest.raises(RuntimeError, match=FWD_REFUSAL):
        torch.ops.fastln.layer_norm_fwd(x, [COLS], weight, None, 1e-5)
