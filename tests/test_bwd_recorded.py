"""Where torch's own autograd records fastln.layer_norm, in C++ (src/bindings_autograd.cpp), and tensors with torch's
negative bit, by which it finds our kernels.

On CUDA that is how a plain call with a gradient goes. Tests on the CPU put the CPU's kernels where those of
src/bindings_autograd.cpp are, so that what Python does around them is tested without a GPU too."""

import pytest
import torch
import torch.nn.functional as F
from bwd_support import BWD, MIXTURES, TENSORS, all_same, backward, grads, leaves, upstream
from norm_support import FWD, each, norm_inputs
from reference import same_bits
from test_bwd_autograd import DERIVATIVES, PRESENT, derivatives, formula
from torch._subclasses.fake_tensor import FakeTensorMode

import fastln
from fastln import _autograd

NODE = "NativeLayerNormBackward0"
NEGATIVE = torch._C.DispatchKey.Negative


def cpu_forward(x, shape, weight, bias, eps):
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included.remove(NEGATIVE), excluded):
        y, mean, rstd = FWD(x, shape, weight, bias, eps)
        return y, mean, torch._neg_view(-rstd)


def cpu_backward(dy, x, shape, mean, rstd, weight, bias, mask):
    mask = [mask[0], mask[1] and weight is not None, mask[2] and bias is not None]
    with torch._C._AutoDispatchBelowAutograd():
        grads = BWD(dy.resolve_neg(), x, shape, mean, rstd.resolve_neg(), weight, bias, mask)
    if torch.is_grad_enabled():
        torch.ops.fastln._layer_norm_bwd_recorded(*grads)
    return grads


@pytest.fixture
def recorded(device, monkeypatch):
    """fastln.layer_norm, recorded by torch on this device."""
    if device.type == "cuda":
        yield fastln.layer_norm
        return
    suits = _autograd._suits_torch

    def suits_cpu(input, weight, bias):
        meta = [t if t is None else CudaAlike(t) for t in (input, weight, bias)]
        return input.is_cpu and suits(*meta)

    class CudaAlike:
        """What _suits_torch() asks a tensor, answered as if it were on CUDA."""

        is_cuda = True

        def __init__(self, tensor):
            self.tensor = tensor

        def __getattr__(self, name):
            return getattr(self.tensor, name)

    monkeypatch.setattr(_autograd, "_suits_torch", suits_cpu)
    monkeypatch.setattr(_autograd, "_PLAIN", (*_autograd._PLAIN, CudaAlike))
    stand_ins = torch.library.Library("aten", "IMPL")
    stand_ins.impl("native_layer_norm", cpu_forward, "Negative", allow_override=True)
    stand_ins.impl("native_layer_norm_backward", cpu_backward, "Negative", allow_override=True)
    yield fastln.layer_norm
    stand_ins._destroy()


pytestmark = pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel:UserWarning")


def negative(tensor):
    """The same values, as minus something else: torch's negative bit over the memory of -tensor."""
    return torch._neg_view(-tensor.detach())


# -------------------------------------------------------------------------------------- what is recorded


@each()
def test_torch_records_it_and_our_kernels_run(recorded, dtype, device):
    for shape, dims in (((7, 33), 1), ((3, 5, 4, 8), 2), ((64,), 1), ((0, 8), 1), ((5, 0), 1)):
        sample = leaves(norm_inputs(dtype, device, shape, dims=dims), *TENSORS)
        dy = upstream(sample)
        y = recorded(*sample)
        assert y.grad_fn.name() == NODE
        expected, _, rstd = FWD(*leaves(sample))
        assert same_bits(y.detach(), expected)
        saved = y.grad_fn._saved_result2
        assert saved.is_neg()
        assert torch.equal(saved.nan_to_num(), rstd.nan_to_num())  # of no columns it is NaN
        y.backward(dy)
        assert all_same(grads(sample), backward(dy, leaves(sample)))


def test_the_op_is_recorded_likewise(recorded, device):
    sample = leaves(norm_inputs(torch.float32, device, (7, 33)), *TENSORS)
    assert torch.ops.fastln.layer_norm(*sample).grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"
    assert torch.ops.fastln.layer_norm(*sample).grad_fn.name() == NODE


def test_what_torch_cannot_record_is_recorded_in_python(recorded, device):
    sample = leaves(norm_inputs(torch.float32, device, (7, 33)), *TENSORS)
    assert recorded(*sample).grad_fn.name() == NODE
    assert recorded(*sample._replace(weight=None)).grad_fn.name() != NODE
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert recorded(*sample).grad_fn.name() != NODE
    for dtypes in MIXTURES.values():
        sample = leaves(norm_inputs(dtypes[0], device, (7, 33)).in_dtypes(*dtypes[1:]), *TENSORS)
        assert recorded(*sample).grad_fn.name() != NODE


@pytest.mark.parametrize("names", [("input",), ("weight",), ("bias",), ("input", "bias")], ids="_".join)
def test_gradients_are_those_asked_for(recorded, names, device):
    sample = leaves(norm_inputs(torch.float32, device, (7, 33)), *names)
    dy = upstream(sample)
    recorded(*sample).backward(dy)
    expected = backward(dy, leaves(sample), [name in names for name in TENSORS])
    assert all_same(grads(sample), expected)


# ------------------------------------------------------------------------------------------- derivatives


@PRESENT
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_of_every_kind_are_right(recorded, derivative, present, device):
    sample = norm_inputs(torch.float64, device, (2, 5))
    weight, bias = (getattr(sample, name) if name in present else None for name in ("weight", "bias"))
    of = derivatives(sample.input, weight, bias)[derivative]
    torch.testing.assert_close(of(lambda x, w, b: recorded(x, [5], w, b)), of(formula))


def nested_gradients(norm, sample, times):
    """The gradients of all leaves, of a loss of the gradients of all leaves, and so on."""
    tensors = [getattr(sample, name) for name in TENSORS]
    loss = norm(sample.input, sample.weight, sample.bias).sin().sum()
    for _ in range(times):
        values = torch.autograd.grad(loss, tensors, create_graph=True)
        loss = sum((g.square() * (1 + g)).sum() for g in values)
    return [g.detach() for g in values]


@pytest.mark.parametrize("times", [2, 3, 4])
def test_derivatives_of_any_order_by_all_leaves_are_right(recorded, times, device):
    sample = leaves(norm_inputs(torch.float64, device, (3, 5)), *TENSORS)
    got = nested_gradients(lambda x, w, b: recorded(x, [5], w, b), sample, times)
    for a, b in zip(got, nested_gradients(formula, sample, times), strict=True):
        torch.testing.assert_close(a, b)


def test_a_graph_may_be_differentiated_twice_over(recorded, device):
    """As rows of a Jacobian are, each with a graph of its own."""
    sample = leaves(norm_inputs(torch.float64, device, (2, 5)), *TENSORS)

    def rows(norm):
        y = norm(sample.input, sample.weight, sample.bias)
        first = [torch.autograd.grad(v.square(), sample.input, create_graph=True)[0] for v in y.flatten()]
        return torch.stack([torch.autograd.grad(g.square().sum(), sample.input, retain_graph=True)[0] for g in first])

    torch.testing.assert_close(rows(lambda x, w, b: recorded(x, [5], w, b)), rows(formula))


@each(torch.float16, torch.bfloat16, torch.float32)
def test_second_derivatives_have_the_dtypes_of_their_leaves(recorded, dtype, device):
    sample = leaves(norm_inputs(dtype, device, (7, 33)), *TENSORS)
    tensors = [getattr(sample, name) for name in TENSORS]

    def second(norm, sample):
        tensors = [getattr(sample, name) for name in TENSORS]
        first = torch.autograd.grad(norm(*tensors).float().sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), tensors)

    got = second(lambda x, w, b: recorded(x, [33], w, b), sample)
    assert [g.dtype for g in got] == [t.dtype for t in tensors]
    wide = sample._replace(**{name: getattr(sample, name).detach().double().requires_grad_() for name in TENSORS})
    tolerance = 8 * torch.finfo(dtype).eps
    for a, b in zip(got, second(formula, wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * b.abs().max().item())


@pytest.mark.parametrize("name", TENSORS)
def test_derivatives_of_a_batched_backward_are_right(recorded, name, device):
    sample = leaves(norm_inputs(torch.float64, device, (2, 5)), *TENSORS)
    others = [getattr(sample, n) for n in TENSORS]

    def second(norm):
        def of(t):
            return norm(*(t if n == name else getattr(sample, n) for n in TENSORS)).sin()

        rows = torch.autograd.functional.jacobian(of, getattr(sample, name), create_graph=True, vectorize=True)
        return torch.autograd.grad((rows.square() * (1 + rows)).sum(), others)

    for a, b in zip(second(lambda x, w, b: recorded(x, [5], w, b)), second(formula), strict=True):
        torch.testing.assert_close(a, b)


def test_a_node_called_by_hand_gives_the_gradients(recorded, device):
    sample = leaves(norm_inputs(torch.float32, device, (7, 33)), *TENSORS)
    dy = upstream(sample)
    got = recorded(*sample).grad_fn(dy)
    assert all_same([g.detach() for g in got], backward(dy, leaves(sample)))


# ---------------------------------------------------------------------------------------- negative tensors


@pytest.mark.parametrize("name", [*TENSORS, "grad_out"])
@pytest.mark.parametrize(
    "norm", [fastln.layer_norm, torch.ops.fastln.layer_norm, F.layer_norm], ids=lambda f: f.__module__
)
def test_tensors_with_the_negative_bit_are_read_as_what_they_stand_for(norm, name, device):
    sample = leaves(norm_inputs(torch.float32, device, (7, 33)), *TENSORS)
    dy = upstream(sample)
    expected = norm(*sample)
    expected.backward(dy)
    lazy = leaves(sample, *TENSORS)
    if name == "grad_out":
        dy = negative(dy)
    else:
        lazy = lazy._replace(**{name: negative(getattr(lazy, name)).requires_grad_()})
    got = norm(*lazy)
    got.backward(dy)
    assert same_bits(got.detach(), expected.detach())
    assert all_same([g.resolve_neg() for g in grads(lazy)], grads(sample))
    with torch.no_grad():
        assert same_bits(norm(*lazy), expected)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "meta"])
def test_negative_tensors_without_memory_are_left_to_torch(kind):
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, dy = (torch._neg_view(torch.empty(3, 5, device=kind)) for _ in range(2))
        y, mean, rstd = torch.native_layer_norm(x, [5], None, None, 1e-5)
        dx = torch.ops.aten.native_layer_norm_backward(dy, x, [5], mean, rstd, None, None, [True, False, False])[0]
        for t in (y, dx):
            assert (t.shape, t.device.type, t.is_neg()) == ((3, 5), kind, False)


@pytest.mark.parametrize("name", [*TENSORS, "grad_out"])
def test_derivatives_of_third_order_through_negative_tensors_are_right(recorded, name, device):
    sample = leaves(norm_inputs(torch.float64, device, (3, 5)), *TENSORS)

    def third(norm):
        seen = {n: getattr(sample, n) * 1 for n in TENSORS}
        if name in seen:
            seen[name] = torch._neg_view(-seen[name])
        y = norm(*seen.values())
        dy = y.detach().cos()
        dy = torch._neg_view(-dy) if name == "grad_out" else dy
        tensors = [getattr(sample, n) for n in TENSORS]
        values = torch.autograd.grad(y, tensors, dy.requires_grad_(), create_graph=True)
        for _ in range(2):
            loss = sum((g.square() * (1 + g)).sum() for g in values if g is not None)
            values = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
        return values

    for a, b in zip(third(lambda x, w, b: recorded(x, [5], w, b)), third(formula), strict=True):
        torch.testing.assert_close(a, b)
