"""Autograd of fastln.layer_norm beyond its values: what it saves and asks for, derivatives of every kind and order,
checkpoints, hooks and anomaly mode."""

import pytest
import torch
import torch.nn.functional as F
from bwd_support import (
    BWD,
    MIXTURES,
    TENSORS,
    all_same,
    assert_gradients_match_float64,
    backward,
    block,
    grads,
    leaves,
    step,
    upstream,
)
from norm_support import CALLS, FWD, each, norm_inputs
from reference import EPS, same_bits
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fastln

call_by_either_way = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
PRESENT = pytest.mark.parametrize(
    "present", [(), ("weight",), ("bias",), ("weight", "bias")], ids=lambda p: "_".join(p) or "none"
)


class Calls(TorchDispatchMode):
    """Keeps the op and the arguments of every call of an op, but for those that make views of autograd's own."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def of(self, op):
        return [args for func, args in self.calls if func is op.default]


# --------------------------------------------------------------------- what is saved, and asked for


@call_by_either_way
@pytest.mark.parametrize(
    ("dtypes", "expected"), [((None, None), 3), ((None, torch.float32), 3), ((torch.float32, torch.float16), 4)]
)
def test_saves_input_mean_rstd_and_weight_and_no_more(call, dtypes, expected, device):
    sample = norm_inputs(torch.float16, device, (3, 5, 33)).in_dtypes(*dtypes)
    sample = leaves(sample, *TENSORS)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(*sample)
    assert len(saved) == expected
    x, mean, rstd = saved[:3]
    assert x.data_ptr() == sample.input.data_ptr()
    assert all(same_bits(a, b) for a, b in zip((mean, rstd), FWD(*leaves(sample))[1:], strict=True))
    if sample.weight is not None:
        assert saved[3].data_ptr() == sample.weight.data_ptr()


@call_by_either_way
def test_case_31_work_not_asked_for_is_not_done(call, device):
    for names in ((name,) for name in TENSORS):
        sample = leaves(norm_inputs(torch.float32, device, (3, 33)), *names)
        with Calls() as seen:
            call(*sample).sum().backward()
        (arguments,) = seen.of(BWD)
        assert tuple(arguments[-1]) == tuple(name in names for name in TENSORS)


@call_by_either_way
def test_a_step_is_one_call_of_the_forward_and_one_of_the_backward(call, device):
    """And of no other op: nothing is converted or copied."""
    sample = norm_inputs(torch.float16, device, (3, 33))
    for form in (sample, sample.in_dtypes(torch.float32, torch.float32), sample.in_dtypes(torch.float16, None)):
        form = leaves(form, *TENSORS)
        dy = upstream(form)
        with Calls() as seen:
            call(*form).backward(dy)
        assert [func for func, _ in seen.calls] == [FWD.default, BWD.default]


@each()
@call_by_either_way
def test_gradients_have_the_bits_of_the_op(call, dtype, device):
    sample = leaves(norm_inputs(dtype, device, (7, 33)), *TENSORS)
    dy = upstream(sample)
    y = call(*sample)
    assert same_bits(y.detach(), call(*leaves(sample)))
    y.backward(dy)
    assert all_same(grads(sample), backward(dy, leaves(sample)))


@call_by_either_way
def test_case_32_grad_out_stays_as_it_is_and_a_second_backward_gives_the_same(call, device):
    for dtype in (torch.bfloat16, torch.float32):
        sample = leaves(norm_inputs(dtype, device, (7, 33)), *TENSORS)
        dy = upstream(sample)
        before = dy.clone()
        y = call(*sample)
        tensors = (sample.input, sample.weight, sample.bias)
        first = torch.autograd.grad(y, tensors, dy, retain_graph=True)
        second = torch.autograd.grad(y, tensors, dy)
        assert all_same(first, second)
        assert same_bits(dy, before)


@call_by_either_way
@pytest.mark.parametrize("name", ["input", "weight"])
def test_a_saved_tensor_that_was_written_to_raises(call, name, device):
    sample = leaves(norm_inputs(torch.float32, device, (7, 33)), *TENSORS)
    y = call(*sample)
    with torch.no_grad():
        getattr(sample, name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@call_by_either_way
def test_the_list_of_sizes_may_change_after_the_call(call, device):
    sample = leaves(norm_inputs(torch.float32, device, (7, 33)), *TENSORS)
    shape = [33]
    y = call(sample.input, shape, sample.weight, sample.bias)
    shape[0] = 7
    y.backward(upstream(sample))
    assert_gradients_match_float64(grads(sample), upstream(sample), leaves(sample))


def test_peak_memory_of_a_training_step_is_torchs_own_and_the_stated_workspace(cuda):
    blocks = torch.cuda.get_device_properties(cuda).multi_processor_count

    def peak(function, dtype, rows, cols):
        sample = leaves(norm_inputs(dtype, cuda, (rows, cols)), *TENSORS)
        dy = upstream(sample)
        for _ in range(2):  # the first loads kernels
            for t in (sample.input, sample.weight, sample.bias):
                t.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function(*sample).backward(dy)
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    for dtype in (torch.float16, torch.float32):
        for rows, cols in ((4096, 1024), (4096, 4096), (65536, 128), (512, 16384), (128, 65536)):
            ours, theirs = (peak(f, dtype, rows, cols) for f in (fastln.layer_norm, F.layer_norm))
            workspace = 0 if rows <= 128 and cols < 65536 else 8 * cols * min(blocks, rows)
            assert ours <= theirs + workspace + 512, (dtype, rows, cols)  # allocations come in 512 bytes


# -------------------------------------------------------------------------- derivatives of every kind


def formula(x, weight, bias):
    """Layer norm in ops that torch differentiates any number of times, unlike its own."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def derivatives(x, weight, bias):
    """{name: a derivative of a loss through norm(x, weight, bias), as a function of norm}"""
    draw = torch.Generator().manual_seed(0)
    u, v, c = torch.randn((3, *x.shape), generator=draw, dtype=x.dtype).to(x.device).unbind()
    grad, jvp, vmap = torch.func.grad, torch.func.jvp, torch.func.vmap

    def of_x(norm):
        return lambda t: norm(t, weight, bias)

    def loss(norm):
        return lambda t: (norm(t, weight, bias).sin() * c).sum()

    def row_loss(norm):
        return lambda row: (norm(row, weight, bias).sin() * c[0]).sum()

    def leaf():
        return x.clone().requires_grad_()

    def repeated_backward(times):
        def derivative(norm):
            t = leaf()
            value = loss(norm)(t)
            for _ in range(times - 1):
                (g,) = torch.autograd.grad(value, t, create_graph=True)
                value = (g * v.cos()).sum()
            return torch.autograd.grad(value, t)[0]

        return derivative

    def forward_mode(norm):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(of_x(norm)(forward_ad.make_dual(x, v))).tangent

    def reverse_over_forward(norm):
        t = leaf()
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(of_x(norm)(forward_ad.make_dual(t, v))).tangent
            return torch.autograd.grad((tangent.sin() * c).sum(), t)[0]

    def forward_over_reverse(norm):
        t = leaf()
        y = of_x(norm)(t)
        with forward_ad.dual_level():
            (g,) = torch.autograd.grad(y, t, forward_ad.make_dual(v, c))
            return forward_ad.unpack_dual(g).tangent

    def jvp_without_grad_mode(norm):
        with torch.no_grad():
            return jvp(of_x(norm), (x,), (v,))[1]

    def of_a_vmap(norm):
        t = leaf()
        return torch.autograd.grad((vmap(of_x(norm))(t).sin() * c).sum(), t)[0]

    def batched_backward(norm):
        t = leaf()
        return torch.autograd.grad(of_x(norm)(t), t, torch.stack([u, v, c]), is_grads_batched=True)[0]

    def of_batched_parameters(norm):
        parameters = torch.stack([torch.ones_like(x[0]), u[0]]).requires_grad_()
        y = vmap(lambda p: norm(x, None if weight is None else p, None if bias is None else p))(parameters)
        return torch.autograd.grad(y.sin().sum() + parameters.sum(), parameters)[0]

    return {
        "backward": repeated_backward(1),
        "second_backward": repeated_backward(2),
        "third_backward": repeated_backward(3),
        "forward_mode": forward_mode,
        "reverse_over_forward": reverse_over_forward,
        "forward_over_reverse": forward_over_reverse,
        "backward_of_vmap": of_a_vmap,
        "backward_of_vmap_over_parameters": of_batched_parameters,
        "batched_backward": batched_backward,
        "grad": lambda norm: grad(loss(norm))(x),
        "jvp": lambda norm: jvp(of_x(norm), (x,), (v,))[1],
        "jvp_without_grad_mode": jvp_without_grad_mode,
        "jacrev": lambda norm: torch.func.jacrev(of_x(norm))(x),
        "jacfwd": lambda norm: torch.func.jacfwd(of_x(norm))(x),
        "hessian": lambda norm: torch.func.hessian(loss(norm))(x),
        "jacrev_of_jacrev": lambda norm: torch.func.jacrev(torch.func.jacrev(loss(norm)))(x),
        "grad_of_grad": lambda norm: grad(lambda t: (grad(loss(norm))(t) * v).sum())(x),
        "jvp_of_jvp": lambda norm: jvp(lambda t: jvp(of_x(norm), (t,), (v,))[1], (x,), (u,))[1],
        "grad_of_jvp": lambda norm: grad(lambda t: (jvp(of_x(norm), (t,), (v,))[1].sin() * c).sum())(x),
        "jvp_of_grad": lambda norm: jvp(grad(loss(norm)), (x,), (v,))[1],
        "vmap_of_grad": lambda norm: vmap(grad(row_loss(norm)))(x),
        "grad_of_vmap": lambda norm: grad(lambda t: (vmap(of_x(norm))(t).sin() * c).sum())(x),
        "vmap_of_jvp": lambda norm: vmap(lambda row: jvp(of_x(norm), (row,), (v[0],))[1])(x),
        "vmap_of_vmap_of_grad": lambda norm: vmap(vmap(grad(row_loss(norm))))(x[None]),
    }


DERIVATIVES = list(derivatives(torch.zeros(1, 1), None, None))


@PRESENT
@pytest.mark.parametrize("derivative", DERIVATIVES)
@call_by_either_way
def test_derivatives_of_every_kind_are_right(call, derivative, present, device):
    sample = norm_inputs(torch.float64, device, (2, 5))
    weight, bias = (getattr(sample, name) if name in present else None for name in ("weight", "bias"))
    of = derivatives(sample.input, weight, bias)[derivative]
    torch.testing.assert_close(of(lambda x, w, b: call(x, [5], w, b)), of(formula))


@PRESENT
@call_by_either_way
def test_case_29_second_derivatives_by_the_parameters_are_right(call, present, device):
    """Of a loss that is not linear in them, with each of the leaves in turn as what is differentiated twice."""
    sample = norm_inputs(torch.float64, device, (3, 5))
    names = ("input", *present)

    def second(norm):
        tensors = {name: getattr(sample, name).clone().requires_grad_() for name in names}
        y = norm(tensors["input"], tensors.get("weight"), tensors.get("bias"))
        first = torch.autograd.grad(y.sin().sum(), list(tensors.values()), create_graph=True)
        loss = sum(g.square().sum() for g in first)
        return torch.autograd.grad(loss, list(tensors.values()))

    for got, expected in zip(second(lambda x, w, b: call(x, [5], w, b)), second(formula), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("mixture", [*MIXTURES, "float16", "bfloat16", "float32"])
def test_gradients_of_every_mixture_match_float64(mixture, create_graph, device):
    """Rounded once, to the dtype of what they are gradients of."""
    dtypes = MIXTURES.get(mixture) or (getattr(torch, mixture),) * 3
    for shape, dims in (((33,), 1), ((7, 33), 1), ((3, 5, 4, 8), 2)):
        for weight, bias in (dtypes[1:], (None, dtypes[2]), (dtypes[1], None), (None, None)):
            sample = leaves(norm_inputs(dtypes[0], device, shape, dims=dims).in_dtypes(weight, bias), *TENSORS)
            names = [name for name in TENSORS if getattr(sample, name) is not None]
            tensors = [getattr(sample, name) for name in names]
            dy = upstream(sample)
            grads = torch.autograd.grad(fastln.layer_norm(*sample), tensors, dy, create_graph=create_graph)
            got = dict(zip(names, (g.detach() for g in grads), strict=True))
            assert_gradients_match_float64([got.get(name) for name in TENSORS], dy, leaves(sample), names)


def test_derivatives_of_constant_rows_are_finite_whatever_eps(device):
    for eps in (1e-12, 1e-60):
        sample = norm_inputs(torch.float32, device, (2, 8), eps=eps)
        x = torch.ones_like(sample.input).requires_grad_()
        dx, dweight = torch.autograd.grad(
            fastln.layer_norm(x, [8], sample.weight.requires_grad_(), sample.bias, eps).sum(),
            (x, sample.weight),
            create_graph=True,
        )
        assert dx.isfinite().all()
        assert not dweight.any()
        y = torch.func.vmap(torch.func.grad_and_value(lambda t, eps=eps: fastln.layer_norm(t, [8], eps=eps).sum()))(x)[
            1
        ]
        assert not y.any()


@call_by_either_way
def test_transforms_refuse_a_mistake_with_the_text_of_eager(call):
    text = r"^fastln::layer_norm: expected weight of shape \[5\], got \[4\]$"
    x = torch.randn(2, 5)
    with pytest.raises(RuntimeError, match=text):
        torch.func.grad(lambda t: call(t, [5], torch.ones(4)).sum())(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=text):
        call(forward_ad.make_dual(x, x), [5], torch.ones(4))


# ------------------------------------------------------------------------------------ layer_norm_bwd


def bwd_formula(dy, x, mean, rstd, weight, bias):
    """layer_norm_bwd in ops that torch differentiates, of mean and rstd as they are given."""
    xhat = (x - mean) * rstd
    g = dy * weight
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx, (dy * xhat).sum(0), dy.sum(0) + 0 * bias


def bwd_arguments(device):
    draw = torch.Generator().manual_seed(0)
    shapes = (3, 5), (3, 5), (3, 1), (3, 1), (5,), (5,)
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64).to(device) for shape in shapes]
    tensors[3] = tensors[3].abs() + 0.5  # rstd is positive: the kernels take the sign for a mark of the forward
    return tensors


def bwd_op(dy, x, mean, rstd, weight, bias):
    return BWD(dy, x, [5], mean, rstd, weight, bias, [True] * 3)


@pytest.mark.parametrize("index", [*range(6), slice(None)], ids=str)
def test_layer_norm_bwd_has_a_derivative_of_its_own(index, device):
    """By each argument, mean and rstd as well, to any order."""
    tensors = bwd_arguments(device)

    def derivatives(function):
        leaves = [t.clone() for t in tensors]
        of = leaves[index] if isinstance(index, slice) else [leaves[index]]
        for t in of:
            t.requires_grad_()
        loss = sum(t.sin().sum() for t in function(*leaves))
        for _ in range(2):
            grads = torch.autograd.grad(loss, of, create_graph=True, allow_unused=True, materialize_grads=True)
            yield grads
            loss = sum(g.square().sum() for g in grads) + sum(t.sum() for t in of)

    for got, expected in zip(derivatives(bwd_op), derivatives(bwd_formula), strict=True):
        torch.testing.assert_close(got, expected)


def test_torch_func_and_forward_mode_differentiate_layer_norm_bwd(device):
    tensors = bwd_arguments(device)
    argnums = tuple(range(6))

    def loss(function):
        return lambda *tensors: sum(t.sin().sum() for t in function(*tensors))

    ours, theirs = (torch.func.grad(loss(f), argnums)(*tensors) for f in (bwd_op, bwd_formula))
    torch.testing.assert_close(ours, theirs)
    directions = tuple(t.cos() for t in tensors)
    ours, theirs = (torch.func.jvp(f, tuple(tensors), directions)[1] for f in (bwd_op, bwd_formula))
    torch.testing.assert_close(ours, theirs)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(tensors, directions, strict=True)]
        tangents = tuple(forward_ad.unpack_dual(t).tangent for t in bwd_op(*duals))
    torch.testing.assert_close(tangents, theirs)


# ------------------------------------------------------------------- checkpoints, hooks, anomaly mode


@call_by_either_way
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints_give_the_same_gradients(call, use_reentrant, device):
    plain, kept = (leaves(norm_inputs(torch.float32, device, (7, 33)), "weight", "bias") for _ in range(2))
    expected = step(block(plain, call), plain.input)
    got = step(lambda x: checkpoint(block(kept, call), x, use_reentrant=use_reentrant), kept.input)
    assert same_bits(got, expected)
    assert all_same(grads(kept), grads(plain))


@call_by_either_way
@PRESENT
def test_a_checkpoint_may_end_with_the_norm(call, present, device):
    """The last tensor is then saved within the norm, and there torch ends the recomputation by an exception."""
    sample = norm_inputs(torch.float32, device, (7, 33))
    sample = sample._replace(**{name: None for name in ("weight", "bias") if name not in present})
    plain, kept = (leaves(sample, *present) for _ in range(2))
    expected = step(lambda x: call(*plain.of(x * 2)), plain.input)
    got = step(lambda x: checkpoint(lambda x: call(*kept.of(x * 2)), x, use_reentrant=False), kept.input)
    assert same_bits(got, expected)
    assert all_same(grads(kept), grads(plain))


@pytest.mark.parametrize("save", [True, False])
def test_a_selective_checkpoint_can_save_the_norm_or_recompute_it(save, device):
    plain, kept = (leaves(norm_inputs(torch.float32, device, (7, 33)), "weight", "bias") for _ in range(2))

    def policy(context, op, *args, **kwargs):
        must_save = save and op is FWD.default
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    expected = step(block(plain), plain.input)
    with Calls() as seen:
        got = step(lambda x: checkpoint(block(kept), x, use_reentrant=False, context_fn=contexts), kept.input)
    assert same_bits(got, expected)
    assert all_same(grads(kept), grads(plain))
    assert len(seen.of(FWD)) == (1 if save else 2)


def test_hooks_may_put_saved_tensors_elsewhere(device):
    plain, kept = (leaves(norm_inputs(torch.float32, device, (7, 33)), "weight", "bias") for _ in range(2))
    expected = step(block(plain), plain.input)
    with torch.autograd.graph.save_on_cpu():
        got = step(block(kept), kept.input)
    assert same_bits(got, expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        assert same_bits(step(block(kept), kept.input), expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection|Error detected in RecordedLayerNorm:UserWarning")
def test_anomaly_mode_finds_a_nan_and_nothing_else(device):
    sample = leaves(norm_inputs(torch.float32, device, (7, 33)), "weight", "bias")
    expected = step(block(sample), sample.input)
    with torch.autograd.detect_anomaly(check_nan=True):
        assert same_bits(step(block(sample), sample.input), expected)
        spoiled = leaves(sample, "input")
        with torch.no_grad():
            spoiled.input[0, 0] = torch.nan
        with pytest.raises(RuntimeError, match=r"LayerNorm.* returned nan"):
            fastln.layer_norm(*spoiled).sum().backward()
