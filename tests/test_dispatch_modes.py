"""What a TorchDispatchMode, or make_fx, sees of our ops: the public ones, and nothing private."""

import contextlib

import pytest
import torch
from shared import OpLog
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

import fastln

COLS = 16
GRAD_MODES = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


def calls(device):
    """Each op that has an autograd gate, and the function, with the name it is to be seen by."""
    ops = torch.ops.fastln
    x, weight, bias = (torch.randn(*size, COLS, device=device) for size in ((3,), (), ()))
    _, mean, rstd = ops.layer_norm_fwd(x, [COLS], weight, bias, 1e-5)
    yield "layer_norm", lambda: fastln.layer_norm(x, [COLS], weight, bias)
    yield "layer_norm", lambda: ops.layer_norm(x, [COLS], weight, bias)
    yield "layer_norm_fwd", lambda: ops.layer_norm_fwd(x, [COLS], weight, bias, 1e-5)
    yield "layer_norm_bwd", lambda: ops.layer_norm_bwd(x, x, [COLS], mean, rstd, weight, bias, [True] * 3)
    for kernel in fastln.KERNELS:
        t, w = x.to(kernel.dtype), weight.to(kernel.dtype)
        name = f"layer_norm_{kernel.name}"
        yield name, lambda op=kernel.op, t=t, w=w: op(t, w)
        yield f"{name}.scalar", lambda op=kernel.op, t=t: op(t, 2.0, 1.0)
        yield f"{name}.out", lambda op=kernel.op, t=t, w=w: op.out(t, w, out=torch.empty_like(t))


@pytest.mark.parametrize("grad_mode", GRAD_MODES, ids=lambda mode: mode.__name__)
def test_a_dispatch_mode_sees_the_public_op(grad_mode, device):
    with grad_mode():
        for name, call in calls(device):
            with OpLog() as log:
                call()
            assert log.seen == [name]


@pytest.mark.parametrize("grad_mode", GRAD_MODES[:2], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_public_op(grad_mode, tracing_mode, device):
    def block(x, weight):
        return fastln.layer_norm(x, [COLS], weight) + torch.ops.fastln.layer_norm(x, [COLS], weight)

    with grad_mode():
        graph = make_fx(block, tracing_mode=tracing_mode)(
            torch.randn(3, COLS, device=device), torch.ones(COLS, device=device)
        )
    ours = [node.target for node in graph.graph.nodes if "fastln" in str(node.target)]
    assert ours == [torch.ops.fastln.layer_norm.default] * 2


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("grad_mode", GRAD_MODES[:2], ids=lambda mode: mode.__name__)
def test_make_fx_before_dispatch_records_the_op_as_called(grad_mode, requires_grad, device):
    def block(x, weight):
        return fastln.layer_norm(x, [COLS], weight) + torch.ops.fastln.layer_norm(x, [COLS], weight)

    x, weight = torch.randn(3, COLS, device=device), torch.ones(COLS, device=device)
    with grad_mode():
        graph = make_fx(block, pre_dispatch=True)(x.requires_grad_(requires_grad), weight)
    ours = [node.target for node in graph.graph.nodes if "fastln" in str(node.target)]
    assert ours == [torch.ops.fastln.layer_norm.default] * 2
    y = graph(x, weight)
    assert y.requires_grad == requires_grad
    assert torch.equal(y, block(x, weight))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("grad_mode", GRAD_MODES[:2], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("inside", [True, False])
def test_a_bare_fake_mode_keeps_symbolic_sizes(inside, grad_mode, requires_grad):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    x = mode.from_tensor(torch.randn(3, COLS).requires_grad_(requires_grad), symbolic_context=sizes)
    with grad_mode(), mode if inside else contextlib.nullcontext():
        y = fastln.layer_norm(x, x.shape[-1:])
    assert all(isinstance(size, torch.SymInt) for size in y.shape)
    assert not mode.shape_env.guards


class Wrapper(torch.Tensor):
    """Holds a tensor, and writes down what ops of ours it is shown."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held, seen):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held, seen):
        self.held, self.seen = held, seen

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (seen, *_) = [a.seen for a in pytree.tree_leaves(args) if isinstance(a, cls)]
        if func.namespace == "fastln":
            seen.append(func.name().removeprefix("fastln::"))
        held = pytree.tree_map_only(cls, lambda w: w.held, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, lambda t: cls(t, seen), func(*held[0], **held[1]))


@pytest.mark.parametrize("wrapped", ["input", "weight"])
@pytest.mark.parametrize("grad_mode", GRAD_MODES, ids=lambda mode: mode.__name__)
def test_a_tensor_with_a_dispatch_of_its_own_is_shown_the_public_op(grad_mode, wrapped, device):
    seen = []
    x, weight = torch.randn(3, COLS, device=device), torch.rand(COLS, device=device)
    with grad_mode():
        expected = fastln.layer_norm(x, [COLS], weight)
        if wrapped == "input":
            x = Wrapper(x, seen)
        else:
            weight = Wrapper(weight, seen)
        y = fastln.layer_norm(x, [COLS], weight)
    assert seen == ["layer_norm"]
    assert torch.equal(y.held, expected)


@pytest.mark.parametrize("name", ["input", "weight"])
def test_a_tensor_with_a_dispatch_of_its_own_is_shown_public_ops_in_training(name, device):
    seen = []
    x, weight = torch.randn(3, COLS, device=device), torch.rand(COLS, device=device)
    leaf = Wrapper(x if name == "input" else weight, seen).requires_grad_()
    y = fastln.layer_norm(leaf, [COLS], weight) if name == "input" else fastln.layer_norm(x, [COLS], leaf)
    y.sum().backward()
    assert seen == ["layer_norm_fwd", "layer_norm_bwd"]
