"""What a TorchDispatchMode, or make_fx, sees of our ops: the public ones, and nothing private."""

import contextlib

import pytest
import torch
from shared import OpLog
from torch.fx.experimental.proxy_tensor import make_fx

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
