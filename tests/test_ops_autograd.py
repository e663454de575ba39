"""Grad modes and derivatives of the named ops: inference costs nothing, gradients are the formula's, and a derivative
that is not there raises instead of being zero."""

import pytest
import torch
from bwd_support import TENSORS, assert_gradients_match_float64, upstream
from fresh import python
from norm_support import Norm
from reference import call_out, layer_norm_float64, same_bits, sample_inputs
from torch.utils.checkpoint import checkpoint

OVERLOADS = {
    "default": lambda kernel, x, w, b: kernel.op(x, w, b),
    "scalar": lambda kernel, x, w, b: kernel.op.scalar(x, 1.5, 0.5),
}

NO_RULE = "^fastln::layer_norm_\\w+: expected no derivative by forward mode or torch.func, .*got one$"


def with_grad(kernel, device, *names, shape=(3, 33), **parameters):
    """Sample inputs of which those in `names` require grad."""
    sample = sample_inputs(kernel, device, shape, **parameters)
    pairs = zip(TENSORS, sample[:3], strict=True)
    return [t if t is None else t.detach().requires_grad_(name in names) for name, t in pairs]


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_has_the_same_bits_without_grad(kernel, overload, mode, device):
    arguments = with_grad(kernel, device, *TENSORS)
    expected = OVERLOADS[overload](kernel, *arguments)
    with mode():
        y = OVERLOADS[overload](kernel, *arguments)
    assert same_bits(y, expected.detach())
    assert not y.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)


def test_inference_tensors_are_taken_in_every_mode(kernel, device):
    with torch.inference_mode():
        sample = sample_inputs(kernel, device, (3, 33))
        expected = kernel.op(*sample)
        assert same_bits(call_out(kernel, sample), expected)
    assert same_bits(kernel.op(*sample), expected)
    with torch.no_grad():
        assert same_bits(kernel.op(*sample), expected)
        assert same_bits(call_out(kernel, sample, torch.empty_like(expected)), expected)


def test_output_requires_grad_only_where_an_input_does(kernel, device):
    assert not kernel.op(*with_grad(kernel, device)).requires_grad
    for name in TENSORS:
        y = kernel.op(*with_grad(kernel, device, name))
        assert y.requires_grad and not y.is_leaf


# ----------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("overload", OVERLOADS)
def test_a_checkpoint_may_end_with_the_op(kernel, overload, device):
    """The last tensor is then saved within the op, and there torch ends the recomputation by an exception."""
    plain, kept = (with_grad(kernel, device, *TENSORS) for _ in range(2))
    expected = OVERLOADS[overload](kernel, *plain)
    got = checkpoint(OVERLOADS[overload], kernel, *kept, use_reentrant=False)
    for y in (expected, got):
        y.sum().backward()
    assert same_bits(got.detach(), expected.detach())
    for a, b in zip(kept, plain, strict=True):
        assert (a.grad is b.grad is None) or same_bits(a.grad, b.grad)


def gradients(kernel, arguments, dy):
    """Those of the arguments, by `backward()` of the default overload."""
    kernel.op(*arguments).backward(dy)
    return [None if t is None else t.grad for t in arguments]


@pytest.mark.parametrize("parameters", ["element", "float32"])
def test_gradients_are_those_of_the_formula(kernel, parameters, device):
    """Exactly those asked for, in each parameter's dtype, also where the kernel accumulates in float16."""
    subsets = [("input",), ("weight",), ("bias",), ("input", "bias"), TENSORS]
    for cols, names in [(33, names) for names in subsets] + [(cols, TENSORS) for cols in (1, 769, 1024)]:
        arguments = with_grad(kernel, device, *names, shape=(5, 7, cols), weight=parameters, bias=parameters)
        norm = Norm(arguments[0].detach(), [cols], arguments[1], arguments[2])
        dy = upstream(norm)
        assert_gradients_match_float64(gradients(kernel, arguments, dy), dy, norm, names)


def test_gradients_with_one_parameter_or_none(kernel, device):
    for absent in (("weight",), ("bias",), ("weight", "bias")):
        arguments = with_grad(kernel, device, *TENSORS, shape=(7, 33), **dict.fromkeys(absent))
        norm = Norm(arguments[0].detach(), [33], *arguments[1:])
        dy = upstream(norm)
        names = [name for name in TENSORS if name not in absent]
        assert_gradients_match_float64(gradients(kernel, arguments, dy), dy, norm, names)


def test_gradient_of_the_scalar_overload(kernel, device):
    x = with_grad(kernel, device, "input", shape=(7, 33))[0]
    norm = Norm(x.detach(), [33], torch.full((33,), 1.1, device=device), None)
    dy = upstream(norm)
    kernel.op.scalar(x, 1.1, 0.5).backward(dy)  # float16 does not hold 1.1
    assert_gradients_match_float64((x.grad, None, None), dy, norm, ("input",))


def test_gradients_of_eps_and_of_strided_tensors(kernel, device):
    x, weight, bias = with_grad(kernel, device, *TENSORS, shape=(7, 66))
    norm = Norm(x.detach()[:, ::2], [33], weight.detach()[::2], bias.detach()[1::2], 0.5)
    dy = upstream(norm)[:1].expand(7, 33)
    before = dy.clone()
    kernel.op(x[:, ::2], weight[::2], bias[1::2], 0.5).backward(dy)
    got = (x.grad[:, ::2].contiguous(), weight.grad[::2].contiguous(), bias.grad[1::2].contiguous())
    assert_gradients_match_float64(got, dy, norm)
    assert same_bits(dy.contiguous(), before.contiguous())


def test_gradients_of_rows_that_overflow_float16_are_those_of_the_formula(kernel, device):
    """The value of such a row may be its bias alone; the gradient does not follow it there."""
    x = (100 * with_grad(kernel, device, shape=(3, 512))[0]).detach().requires_grad_()
    norm = Norm(x.detach(), [512], None, None)
    dy = upstream(norm)
    kernel.op(x).backward(dy)
    assert_gradients_match_float64((x.grad, None, None), dy, norm, ("input",))


@pytest.mark.parametrize("overload", OVERLOADS)
def test_saves_input_and_weight_and_no_more(kernel, overload, device):
    arguments = with_grad(kernel, device, *TENSORS)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        OVERLOADS[overload](kernel, *arguments)
    expected = arguments[:2] if overload == "default" else arguments[:1]
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in expected]


@pytest.mark.parametrize("overload", OVERLOADS)
def test_second_derivatives_are_right(kernel, overload, device):
    def second_derivatives(y, arguments):
        (first,) = torch.autograd.grad(y.sin().sum(), arguments[:1], create_graph=True)
        leaves = arguments[:2] if overload == "default" else arguments[:1]
        return torch.autograd.grad((first * first).sum(), leaves)

    arguments = with_grad(kernel, device, *TENSORS)
    wide = [t.detach().double().requires_grad_() for t in arguments]
    expected = layer_norm_float64(*(wide if overload == "default" else (wide[0], *(torch.tensor([1.5, 0.5]))))).y
    got = second_derivatives(OVERLOADS[overload](kernel, *arguments), arguments)
    relative = 1e-4 if kernel.element == "float32" else 2e-2
    for a, b in zip(got, second_derivatives(expected, wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=relative, atol=relative * b.abs().max().item())


@pytest.mark.parametrize("overload", OVERLOADS)
def test_compiled_training_step_gives_the_bits_of_eager(kernel, overload, device, fresh_compiler):
    def step(call):
        x, weight, bias = with_grad(kernel, device, *TENSORS)
        y = call(x, weight, bias)
        y.backward(torch.ones_like(y) * 0.25)
        return [y.detach(), *(t.grad for t in (x, weight, bias) if t.grad is not None)]

    def call(*arguments):
        return OVERLOADS[overload](kernel, *arguments) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(same_bits(a, b) for a, b in zip(step(compiled), step(call), strict=True))


# --------------------------------------------------------------------------- what there is no rule for


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("name", TENSORS)
def test_func_grad_raises_instead_of_giving_zeros(kernel, name, overload):
    if overload == "scalar" and name != "input":
        pytest.skip("the scalar overload has no such tensor")
    arguments = dict(zip(TENSORS, with_grad(kernel, "cpu"), strict=True))

    def loss(t):
        return OVERLOADS[overload](kernel, *(arguments | {name: t}).values()).square().sum()

    with pytest.raises(RuntimeError, match=NO_RULE):
        torch.func.grad(loss)(arguments[name])
    with pytest.raises(RuntimeError, match=NO_RULE):
        torch.func.grad(lambda ts: torch.func.vmap(loss)(ts).sum())(torch.stack([arguments[name]] * 2))


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_func_jvp_raises_instead_of_giving_zeros(kernel, mode, overload):
    x, weight, bias = with_grad(kernel, "cpu")
    with mode(), pytest.raises(RuntimeError, match=NO_RULE):
        torch.func.jvp(lambda t: OVERLOADS[overload](kernel, t, weight, bias), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("overload", OVERLOADS)
def test_forward_mode_raises_instead_of_dropping_the_tangent(kernel, overload, device):
    x, weight, bias = with_grad(kernel, device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=NO_RULE):
            OVERLOADS[overload](kernel, dual, weight, bias)
        with pytest.raises(RuntimeError, match="grad"):
            kernel.op.out(dual, weight, bias, out=torch.empty_like(x))
        assert same_bits(OVERLOADS[overload](kernel, x, weight, bias), OVERLOADS[overload](kernel, x, weight, bias))


@pytest.mark.parametrize("name", [*TENSORS, "out"])
def test_out_overload_refuses_an_argument_that_requires_grad(kernel, name, device):
    x, weight, bias = with_grad(kernel, device, name)
    out = torch.full((3, 33), 7.0, dtype=kernel.dtype, device=device, requires_grad=name == "out")
    with pytest.raises(RuntimeError, match=f"{kernel.qualname}.*grad"):
        kernel.op.out(x, weight, bias, out=out)
    assert (out == 7.0).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_out_overload_takes_parameters_that_require_grad_without_grad_mode(kernel, mode, device):
    arguments = with_grad(kernel, device, *TENSORS)
    expected = kernel.op(*arguments).detach()
    with mode():
        out = torch.empty_like(expected)
        kernel.op.out(*arguments, out=out)
    assert same_bits(out, expected)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without torch.distributed")
def test_gradient_of_the_scalar_overload_of_a_dtensor():
    python(
        """
        import torch, torch.distributed as dist, fastln
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)]).requires_grad_()
        torch.ops.fastln.layer_norm_f32(x, 2.0, 0.5).square().sum().backward()
        local = x.detach().to_local().requires_grad_()
        torch.ops.fastln.layer_norm_f32(local, 2.0, 0.5).square().sum().backward()
        assert x.grad.placements == (Shard(0),)
        torch.testing.assert_close(x.grad.to_local(), local.grad)
        """
    )


# --------------------------------------------------------------- derivatives that go by something else


def other_derivatives(op, x):
    """Derivatives of op(x)·w by w, where no part goes through the op."""
    w = torch.full_like(x, 0.5)
    grad, jvp = torch.func.grad, torch.func.jvp
    yield grad(lambda w: (op(x) * w).sum())(w)
    yield grad(lambda w: (op(w.detach() * 0 + x) * w).sum())(w)
    yield grad(lambda w: grad(lambda v: (op(x) * v * w).sum())(w).sum())(w)
    yield torch.func.vmap(grad(lambda w, x: (op(x) * w).sum()))(w, x)
    yield jvp(lambda w: op(x) * w, (w,), (torch.ones_like(w),))[1]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        yield torch.autograd.forward_ad.unpack_dual(op(x) * dual).tangent


@pytest.mark.parametrize("overload", OVERLOADS)
def test_a_derivative_by_something_else_is_not_refused(kernel, overload, device):
    x, weight, bias = with_grad(kernel, device)

    def op(x):
        return OVERLOADS[overload](kernel, x, weight, bias)

    for derivative in other_derivatives(op, x):
        assert same_bits(derivative, op(x))


@pytest.mark.parametrize("overload", OVERLOADS)
def test_an_outer_derivative_is_refused_within_an_inner_one_by_something_else(kernel, overload):
    x, weight, bias = with_grad(kernel, "cpu")
    grad, jvp = torch.func.grad, torch.func.jvp

    def inner(x):
        return grad(lambda w: (OVERLOADS[overload](kernel, x, weight, bias) * w).sum())(x.detach())

    def inner_jvp(x):
        w = x.detach()
        return jvp(lambda w: OVERLOADS[overload](kernel, x, weight, bias) * w, (w,), (w,))[1]

    for function in (inner, inner_jvp):
        with pytest.raises(RuntimeError, match=NO_RULE):
            grad(lambda x, f=function: f(x).sum())(x)
        with pytest.raises(RuntimeError, match=NO_RULE):
            jvp(function, (x,), (x,))
        with pytest.raises(RuntimeError, match=NO_RULE):
            torch.func.vmap(grad(lambda x, f=function: f(x).sum()))(torch.stack([x, x]))
