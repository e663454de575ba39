"""fastln.override as a switch: on, off, nested, from many threads, quiet, and refused where it cannot work."""

import re
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fresh import CPU_PYTHON, python
from needs import missing
from reference import same_bits

import fastln

OPS = ("aten::native_layer_norm", "aten::native_layer_norm_backward")
# fastln.override is the function; the module of that name lies beneath it.
module = __import__("sys").modules["fastln.override"]


def in_force():
    """Where torch's table of kernels says that the two ops' CUDA kernels come from."""
    return [re.search("registered at ([^']*)", repr(torch.library.get_kernel(op, "CUDA")))[1] for op in OPS]


@pytest.fixture(autouse=True)
def stock(request):
    """What is in force without override, checked before and after each test."""
    if torch.version.cuda is None:
        pytest.skip("a torch without CUDA")
    assert not fastln.overriding()
    before = in_force()
    assert not any("fastln" in place for place in before)
    yield before
    assert not fastln.overriding()
    assert in_force() == before


def assert_on():
    assert fastln.overriding()
    assert in_force() == ["fastln.override:0"] * 2


def assert_off(stock):
    assert not fastln.overriding()
    assert in_force() == stock


def test_is_on_from_the_call_until_undone(stock):
    held = fastln.override()
    assert repr(held) == "<fastln.override: on>"
    assert_on()
    held.undo()
    assert repr(held) == "<fastln.override: undone>"
    assert_off(stock)
    held.undo()
    assert_off(stock)


def test_as_a_context_manager_it_ends_with_the_block(stock):
    with fastln.override() as held:
        assert_on()
    assert_off(stock)
    held.undo()
    with pytest.raises(ZeroDivisionError), fastln.override():
        1 / 0  # noqa: B018
    assert_off(stock)


def test_nests_and_the_last_one_out_switches_it_off(stock):
    with fastln.override():
        with fastln.override():
            assert_on()
        assert_on()
    assert_off(stock)
    first, second = fastln.override(), fastln.override()
    first.undo()
    first.undo()
    assert_on()
    second.undo()
    assert_off(stock)


def test_every_dispatch_key_but_cuda_keeps_its_kernel():
    def others():
        return [
            [line for line in torch._C._dispatch_dump_table(op).splitlines() if not line.startswith("CUDA")]
            for op in OPS
        ]

    before = others()
    with fastln.override():
        assert others() == before
    assert others() == before


def test_a_dropped_override_stays_on():
    python(
        """
        import gc, fastln
        fastln.override()
        gc.collect()
        assert fastln.overriding()
        """
    )


def test_many_threads_switch_at_once(stock):
    start, seen = threading.Barrier(4), []

    def work():
        start.wait()
        for _ in range(50):
            with fastln.override():
                seen.append(in_force() == ["fastln.override:0"] * 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 200
    assert_off(stock)


def test_is_quiet_and_leaves_cuda_alone():
    done = python(
        """
        import sys, torch, fastln
        sys.stderr = sys.stdout  # what is written past it is caught below
        with fastln.override():
            with fastln.override():
                pass
        fastln.override()
        assert not torch.cuda.is_initialized()
        """,
        options=["-W", "error"],
    )
    assert done == ""


def test_nothing_reaches_standard_error():
    """torch writes its warning of a replaced kernel there from C++."""
    python(
        """
        import os, tempfile
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            import fastln
            with fastln.override():
                pass
            fastln.override()
            file.seek(0)
            assert file.read() == b"", "something was written"
        """
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_cpu_tensors_are_not_concerned():
    x = torch.randn(5, 33)
    weight, bias = torch.randn(2, 8)
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    expected = F.layer_norm(x, (33,))
    of_nested = F.layer_norm(nested, (8,), weight, bias).unbind()
    with fastln.override():
        assert same_bits(F.layer_norm(x, (33,)), expected)
        again = F.layer_norm(nested, (8,), weight, bias).unbind()
    assert all(same_bits(a, b) for a, b in zip(again, of_nested, strict=True))


def test_meta_tensors_are_not_concerned():
    x = torch.empty(5, 33, device="meta", dtype=torch.float16)
    with fastln.override():
        y, mean, rstd = torch.native_layer_norm(x, (33,), None, None, 1e-5)
    assert (y.shape, mean.shape, rstd.shape) == (x.shape, (5, 1), (5, 1))


# --------------------------------------------------------------------------------------------- refused


def test_is_refused_where_torch_has_no_cuda():
    if not CPU_PYTHON.exists():
        missing(".venv-cpu, a virtual environment with another, CPU-only torch")
    python(
        """
        import torch, fastln
        before = torch._C._dispatch_dump("aten::native_layer_norm")
        try:
            fastln.override()
        except RuntimeError as error:
            assert str(error) == f"fastln.override: expected a torch built for CUDA, got {torch.__version__}", error
        else:
            raise AssertionError("not refused")
        assert not fastln.overriding()
        assert torch._C._dispatch_dump("aten::native_layer_norm") == before
        """,
        interpreter=CPU_PYTHON,
    )


def test_is_refused_where_the_ops_have_other_arguments(stock, monkeypatch):
    real = torch.ops.aten.native_layer_norm_backward
    newer = SimpleNamespace(default=SimpleNamespace(_schema="aten::native_layer_norm_backward(Tensor x) -> Tensor"))
    ops = SimpleNamespace(native_layer_norm=torch.ops.aten.native_layer_norm, native_layer_norm_backward=newer)
    monkeypatch.setattr(module.torch.ops, "aten", ops)
    with pytest.raises(
        RuntimeError, match=r"^fastln\.override: expected a torch with aten::native_layer_norm_backward"
    ):
        fastln.override()
    monkeypatch.undo()
    assert torch.ops.aten.native_layer_norm_backward is real
    assert_off(stock)


def test_is_refused_where_the_ops_are_missing(stock, monkeypatch):
    monkeypatch.setattr(module.torch.ops, "aten", SimpleNamespace())
    with pytest.raises(RuntimeError, match=r"expected a torch with .*, got none in "):
        fastln.override()
    monkeypatch.undo()
    assert_off(stock)


def test_is_refused_where_a_gpu_in_use_is_not_in_the_build(stock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    with pytest.raises(RuntimeError, match=r"^fastln\.override: expected GPUs of .* \(.*9\.0.*\), got 7\.0 as cuda:0$"):
        fastln.override()
    monkeypatch.undo()
    assert_off(stock)


def test_an_error_while_switching_leaves_it_off(stock, monkeypatch):
    monkeypatch.setattr(module, "_fastln_override", lambda on: b"no")
    with pytest.raises(RuntimeError, match=r"^fastln\.override: no$"):
        fastln.override()
    monkeypatch.undo()
    assert_off(stock)
