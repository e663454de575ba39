"""What the ops' Autograd kernels in C++ (src/autograd_gate.h) leave to Python: tensors that see the op themselves, and
everything, where torch has not the functions by which they tell."""

import contextlib
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from fresh import python
from torch.utils import _pytree as pytree

import fastln

COLS = 8
GRAD_MODES = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


class Shown(torch.Tensor):
    """Holds a tensor and has none of its memory; notes the ops of ours that it is shown, or refuses them."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    seen: ClassVar[list[str]] = []
    refuses = False

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace == "fastln":
            cls.seen.append(func.name().removeprefix("fastln::"))
            if cls.refuses:
                raise NotImplementedError("not for this one")
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def calls(wrapped, rows):
    """Each op as (name, call, the same call with plain arguments). In the first, the argument `wrapped` is a Shown."""
    ops = torch.ops.fastln
    plain = {"input": torch.randn(rows, COLS), "weight": torch.randn(COLS), "bias": torch.randn(COLS)}
    shown = {name: Shown(t) if name == wrapped else t for name, t in plain.items()}
    general = {
        "layer_norm": lambda a: ops.layer_norm(a["input"], [COLS], a["weight"], a["bias"]),
        "layer_norm_fwd": lambda a: ops.layer_norm_fwd(a["input"], [COLS], a["weight"], a["bias"], 1e-5),
        "layer_norm_bwd": lambda a: ops.layer_norm_bwd(
            plain["input"],
            *(a["input"], [COLS], torch.zeros(rows, 1), torch.ones(rows, 1), a["weight"], a["bias"], [True] * 3),
        ),
    }
    for name, call in general.items():
        yield name, lambda call=call: call(shown), lambda call=call: call(plain)
    for kernel in fastln.KERNELS:
        theirs, ours = ({n: cast(t, kernel) for n, t in a.items()} for a in (shown, plain))
        name = f"layer_norm_{kernel.name}"
        yield name, *(lambda a=a, op=kernel.op: op(a["input"], a["weight"], a["bias"]) for a in (theirs, ours))
        if wrapped == "input":
            yield f"{name}.scalar", *(lambda a=a, op=kernel.op: op(a["input"], 2.0, 1.0) for a in (theirs, ours))


def cast(t, kernel):
    return Shown(t.held.to(kernel.dtype)) if isinstance(t, Shown) else t.to(kernel.dtype)


@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize("wrapped", ["input", "weight", "bias"])
@pytest.mark.parametrize("grad_mode", GRAD_MODES, ids=lambda mode: mode.__name__)
def test_a_tensor_without_memory_is_shown_the_public_op(grad_mode, wrapped, rows):
    for name, call, plain_call in calls(wrapped, rows):
        Shown.seen.clear()
        with grad_mode():
            got, expected = call(), plain_call()
        assert Shown.seen == [name]
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
            assert torch.equal(a.held, b)


@pytest.mark.parametrize("grad_mode", GRAD_MODES, ids=lambda mode: mode.__name__)
def test_an_out_without_memory_is_shown_the_public_op(grad_mode):
    for kernel in fastln.KERNELS:
        x = torch.randn(3, COLS).to(kernel.dtype)
        out = Shown(torch.empty_like(x))
        Shown.seen.clear()
        with grad_mode():
            kernel.op.out(x, out=out)
            expected = kernel.op(x)
        assert Shown.seen == [f"layer_norm_{kernel.name}.out"]
        assert torch.equal(out.held, expected)


@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize("grad_mode", GRAD_MODES, ids=lambda mode: mode.__name__)
def test_the_error_of_such_a_tensor_has_a_text(grad_mode, rows, monkeypatch):
    """Before torch 2.13 not its own, but one that names the op."""
    monkeypatch.setattr(Shown, "refuses", True)
    for name, call, _ in calls("input", rows):
        with grad_mode(), pytest.raises(RuntimeError) as caught:
            call()
        assert "not for this one" in str(caught.value) or name.partition(".")[0] in str(caught.value)


# ------------------------------------------------------------------- a torch without the functions that are asked

ASKED = [b"_ZN5torch8autograd14ForwardADLevel14try_get_by_idxEm", b"_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"]


@pytest.fixture(scope="module")
def without_what_it_asks(tmp_path_factory):
    """A folder with this package, whose library asks torch for functions by names that no torch has."""
    package = Path(fastln.__file__).parent
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(package, folder / "fastln", ignore=shutil.ignore_patterns("__pycache__"))
    library = folder / "fastln" / "libfastln.so"
    code = library.read_bytes()
    for name in ASKED:
        assert name + b"\0" in code
        code = code.replace(name + b"\0", name[:-1] + b"X\0")
    library.write_bytes(code)
    return str(folder)


ARGUMENTS = """
import torch, fastln
from torch.autograd import forward_ad
assert fastln.__file__.startswith({folder!r}), fastln.__file__
x, tangent, weight, bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(8)
op, named = torch.ops.fastln.layer_norm, torch.ops.fastln.layer_norm_f32
"""


def test_no_tangent_is_dropped_where_torch_cannot_tell_of_forward_mode(without_what_it_asks):
    python(
        ARGUMENTS.format(folder=without_what_it_asks),
        """
        expected = torch.func.jvp(lambda x: torch.nn.functional.layer_norm(x, [8], weight, bias), (x,), (tangent,))[1]
        for mode in (torch.enable_grad, torch.no_grad):
            with forward_ad.dual_level(), mode():
                dual = forward_ad.make_dual(x, tangent)
                torch.testing.assert_close(forward_ad.unpack_dual(op(dual, [8], weight, bias)).tangent, expected)
                try:
                    named(dual, weight, bias)
                except RuntimeError as error:
                    assert "expected no derivative by forward mode" in str(error), error
                else:
                    raise AssertionError("not refused")
        """,
        PYTHONPATH=without_what_it_asks,
    )


def test_modes_are_shown_the_public_op_where_torch_cannot_tell_of_them(without_what_it_asks):
    python(
        ARGUMENTS.format(folder=without_what_it_asks),
        """
        from torch.utils._python_dispatch import TorchDispatchMode

        class Log(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func.namespace == "fastln":
                    seen.append(func.name())
                return func(*args, **(kwargs or {}))

        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            seen = []
            with mode(), Log():
                op(x, [8], weight, bias)
                named(x, weight, bias)
                torch.ops.fastln.layer_norm_fwd(x, [8], weight, bias, 1e-5)
            assert seen == ["fastln::layer_norm", "fastln::layer_norm_f32", "fastln::layer_norm_fwd"], seen
        """,
        PYTHONPATH=without_what_it_asks,
    )


def test_plain_calls_are_right_where_torch_cannot_tell(without_what_it_asks):
    python(
        ARGUMENTS.format(folder=without_what_it_asks),
        """
        expected = torch.nn.functional.layer_norm(x, [8], weight, bias)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                out = torch.empty(3, 8)
                named(x, weight, bias, out=out)
                results = op(x, [8], weight, bias), named(x, weight, bias), fastln.layer_norm(x, [8], weight, bias)
                for y in (out, *results):
                    torch.testing.assert_close(y, expected)
        """,
        PYTHONPATH=without_what_it_asks,
    )
