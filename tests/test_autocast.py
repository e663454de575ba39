"""torch.autocast: our layer norm has the dtypes and the values of nn.LayerNorm under it."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from module_support import pair
from norm_support import CALLS, FWD, assert_norm_matches_float64, dtype_id, each, norm_inputs
from reference import same_bits
from shared import counting_backend
from torch._subclasses.fake_tensor import FakeTensorMode

import fastln

call_by_either_way = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
reduced = pytest.mark.parametrize("reduced", [torch.float16, torch.bfloat16], ids=dtype_id)
# dtypes of the input and of the parameters that F.layer_norm takes on the CPU
CPU_DTYPES = [(d, d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
CPU_DTYPES += [(torch.float16, torch.float32), (torch.bfloat16, torch.float32)]


@contextlib.contextmanager
def autocast_for_cuda(dtype=torch.float16):
    """torch.autocast("cuda"), which switches itself off where there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


# ------------------------------------------------------------------------------------------------- CPU


@reduced
@pytest.mark.parametrize("dtypes", CPU_DTYPES, ids=lambda d: "_".join(map(dtype_id, d)))
def test_case_34_on_the_cpu_the_module_is_as_nn_layer_norm(dtypes, reduced, fresh_compiler):
    stock, ours = pair(33, dtype=dtypes[1])
    x = norm_inputs(dtypes[0], "cpu", (5, 33)).input
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.enable_grad):
        with torch.autocast("cpu", reduced), mode():
            expected, got, traced = stock(x), ours(x), compiled(x)
        assert same_bits(got.detach(), expected.detach())
        assert same_bits(traced.detach(), expected.detach())


@reduced
def test_on_the_cpu_gradients_are_those_of_nn_layer_norm(reduced):
    stock, ours = pair(33)
    linear = torch.nn.Linear(33, 33)
    grads = []
    for module in (stock, ours):
        x = norm_inputs(torch.float32, "cpu", (5, 33)).input.requires_grad_()
        with torch.autocast("cpu", reduced):
            y = module(linear(x))
        assert y.dtype == reduced
        y.float().pow(3).sum().backward()
        grads.append([x.grad, *(p.grad for p in module.parameters())])
    for got, expected in zip(*reversed(grads), strict=True):
        assert got.dtype == expected.dtype
        relative = 4 * torch.finfo(reduced).eps
        torch.testing.assert_close(got, expected, rtol=relative, atol=relative * expected.abs().max().item())


@call_by_either_way
def test_tensors_on_the_cpu_ignore_autocast_for_cuda(call):
    sample = norm_inputs(torch.float16, "cpu", (5, 33))
    expected = call(*sample)
    with autocast_for_cuda():
        assert same_bits(call(*sample), expected)


# ------------------------------------------------------------------------ dtypes on CUDA, without a GPU


@reduced
@call_by_either_way
def test_on_cuda_the_dtype_is_that_of_f_layer_norm(call, reduced):
    with FakeTensorMode(), autocast_for_cuda(reduced):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = torch.empty(5, 33, dtype=dtype, device="cuda")
            for parameter in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
                weight, bias = torch.empty(2, 33, dtype=parameter, device="cuda")
                expected = F.layer_norm(x, [33], weight, bias)
                assert call(x, [33], weight, bias).dtype == expected.dtype
                assert call(x, [33]).dtype == F.layer_norm(x, [33]).dtype


@call_by_either_way
def test_on_cuda_autocast_can_be_left_again(call):
    with FakeTensorMode():
        x = torch.empty(5, 33, dtype=torch.float16, device="cuda")
        with autocast_for_cuda():
            assert call(x, [33]).dtype == torch.float32
            with torch.autocast("cuda", enabled=False):
                assert call(x, [33]).dtype == torch.float16
            assert call(x, [33]).dtype == torch.float32
        assert call(x, [33]).dtype == torch.float16


def test_layer_norm_fwd_follows_native_layer_norm():
    with FakeTensorMode(), autocast_for_cuda():
        x = torch.empty(5, 33, dtype=torch.float16, device="cuda")
        weight = torch.empty(33, dtype=torch.float16, device="cuda")
        got, expected = FWD(x, [33], weight, None, 1e-5), torch.native_layer_norm(x, [33], weight, None, 1e-5)
    assert [t.dtype for t in got] == [t.dtype for t in expected] == [torch.float32] * 3


def test_the_op_takes_keywords_under_autocast():
    with FakeTensorMode(), autocast_for_cuda():
        x, bias = (torch.empty(*shape, dtype=torch.float16, device="cuda") for shape in ((5, 33), (33,)))
        y = torch.ops.fastln.layer_norm(x, normalized_shape=[33], bias=bias, eps=1e-3)
    assert y.dtype == torch.float32


@pytest.mark.parametrize("parameter", [None, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("choice", ["op", "inductor"])
def test_compiled_inference_on_cuda_has_the_dtype_of_eager(choice, parameter, fresh_compiler):
    backend, graphs = counting_backend()
    compiled = torch.compile(lambda *arguments: fastln.layer_norm(*arguments), backend=backend, fullgraph=True)
    before = fastln.set_compile_mode(choice, choice)
    try:
        with FakeTensorMode(), torch.no_grad():
            x = torch.empty(5, 33, dtype=torch.float16, device="cuda")
            weight = None if parameter is None else torch.empty(33, dtype=parameter, device="cuda")
            expected = fastln.layer_norm(x, [33], weight).dtype
            assert compiled(x, [33], weight).dtype == expected == torch.float16
            with autocast_for_cuda():
                expected = F.layer_norm(x, [33], weight).dtype
                assert fastln.layer_norm(x, [33], weight).dtype == expected == torch.float32
                assert compiled(x, [33], weight).dtype == expected
    finally:
        fastln.set_compile_mode(*before)
    assert len(graphs) == 2


@call_by_either_way
def test_bad_input_is_refused_in_the_same_words_under_autocast(call):
    with FakeTensorMode(), autocast_for_cuda():
        x = torch.empty(5, 33, dtype=torch.int32, device="cuda")
        with pytest.raises(RuntimeError, match=r"^fastln::layer_norm: expected input of dtype .*, got int32"):
            call(x, [33])


# ------------------------------------------------------------------------------------------------- GPU


@reduced
@each(torch.float16, torch.bfloat16, torch.float32)
@call_by_either_way
def test_case_33_a_reduced_input_meets_float32_parameters(call, dtype, reduced, cuda):
    sample = norm_inputs(dtype, cuda, (15, 768)).in_dtypes(torch.float32, torch.float32)
    with torch.autocast("cuda", reduced):
        y = call(*sample)
        assert y.dtype == F.layer_norm(*sample).dtype == torch.float32
    assert_norm_matches_float64(y, sample.of(sample.input.float()))


@reduced
@each(torch.float16, torch.bfloat16, torch.float32, torch.float64)
def test_case_34_on_cuda_the_module_is_as_nn_layer_norm(dtype, reduced, cuda, fresh_compiler):
    stock, ours = pair(768, cuda, torch.float64 if dtype == torch.float64 else torch.float32)
    grads = []
    modules = (stock, ours, torch.compile(ours, backend="aot_eager", fullgraph=True))
    for module in modules:
        x = norm_inputs(dtype, cuda, (15, 768)).input.requires_grad_()
        module.zero_grad()
        with torch.autocast("cuda", reduced):
            y = module(x)
        y.pow(3).sum().backward()
        grads.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for others in grads[1:]:
        for got, expected in zip(others, grads[0], strict=True):
            assert got.dtype == expected.dtype
            relative = 4 * torch.finfo(got.dtype).eps + 1e-5
            torch.testing.assert_close(got, expected, rtol=relative, atol=relative * expected.abs().max().item())


@pytest.mark.slow
@reduced
def test_case_34_a_compiled_block_under_autocast(reduced, cuda, inductor, fresh_compiler):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)).to(cuda)
    x = torch.randn(15, 64, device=cuda)
    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cuda", reduced):
        expected = model(x)
        fastln.convert(model)
        for y in (model(x), compiled(x)):
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


def test_autocast_is_traced_into_the_graph(cuda, fresh_compiler):
    backend, graphs = counting_backend()
    compiled = torch.compile(fastln.layer_norm, backend=backend, fullgraph=True)
    sample = norm_inputs(torch.float16, cuda, (15, 33))
    assert compiled(*sample).dtype == torch.float16
    with torch.autocast("cuda", torch.float16):
        assert compiled(*sample).dtype == torch.float32
    assert len(graphs) == 2
