"""fastln.layer_norm under torch.library.opcheck, torch.compile, torch.export and vmap."""

import pytest
import torch
from norm_support import CALLS, FWD, OP, assert_norm_matches_float64, each, norm_inputs
from reference import same_bits
from shared import counting_backend

import fastln

call_by_either_way = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request, fresh_compiler):
    """A backend of torch.compile, by name."""
    if request.param == "inductor":
        request.getfixturevalue("inductor")
    return request.param


def opcheck_samples(dtype, device):
    """Arguments that take different ways through checks, layouts and dtypes."""
    yield norm_inputs(dtype, device, (4, 33))
    yield norm_inputs(dtype, device, (2, 3, 4, 8), dims=2, eps=0.5).in_dtypes(torch.float32, None)
    sample = norm_inputs(dtype, device, (8, 5))
    yield sample.of(sample.input.t().contiguous().t()).in_dtypes(None, torch.float64)  # case 40
    yield norm_inputs(dtype, device, (0, 8)).in_dtypes(None, None)


@each(torch.float16, torch.float64)
def test_opcheck_layer_norm(dtype, device):
    """All of its test_utils, for tensors with and without gradients."""
    for sample in (*opcheck_samples(dtype, device), norm_inputs(dtype, device, (3, 0))):
        torch.library.opcheck(OP.default, sample)
    sample = norm_inputs(dtype, device, (4, 33))
    for t in (sample.input, sample.weight, sample.bias):
        t.requires_grad_()
    torch.library.opcheck(OP.default, sample)


@each(torch.float16, torch.float64)
def test_case_35_opcheck_layer_norm_fwd(dtype, device):
    """Not without columns, where rstd is NaN, which opcheck finds unequal to itself."""
    for sample in opcheck_samples(dtype, device):
        torch.library.opcheck(FWD.default, sample)


def block(call, sample, x):
    """Calls between ops that a compiler may fuse or reorder; each rounds once, so that fusing changes no bit."""
    y = call(*sample.of(x * 2))
    z = call(*sample.in_dtypes(None, None).of(y + x))
    return y, z.relu(), *FWD(*sample.of(z))


@each(torch.float16, torch.float32)
@call_by_either_way
def test_compiled_code_gives_the_bits_of_eager(call, dtype, compiler, device):
    sample = norm_inputs(dtype, device, (4, 33))
    compiled = torch.compile(block, fullgraph=True, backend=compiler)
    expected = block(call, sample, sample.input)
    assert all(same_bits(a, b) for a, b in zip(compiled(call, sample, sample.input), expected, strict=True))


def test_case_40_compiled_code_relies_on_the_strides_that_the_fake_announces(compiler, device):
    sample = norm_inputs(torch.float32, device, (8, 8))
    x = sample.input

    def flattened(t):
        return fastln.layer_norm(*sample.of(t)).flatten() * 2, FWD(*sample.of(t))[1].flatten() * 2

    compiled = torch.compile(flattened, fullgraph=True, backend=compiler, dynamic=False)
    for layout in (x.t(), x[::2], x[:1].expand(5, 8), x.view(2, 2, 2, 8).permute(1, 2, 0, 3)):
        assert all(same_bits(a, b) for a, b in zip(compiled(layout), flattened(layout), strict=True))


def test_case_47_padded_strides_reach_the_op(compiler, device):
    sample = norm_inputs(torch.float32, device, (4, 30))
    linear = torch.nn.Linear(16, 33, device=device)
    x = norm_inputs(torch.float32, device, (4, 16)).input

    def sliced(t):
        hidden = linear(t)[:, 1:31]
        return hidden, fastln.layer_norm(*sample.of(hidden)), fastln.layer_norm(*sample.of(hidden.contiguous()))

    with torch.no_grad():
        hidden, y, y_of_copy = torch.compile(sliced, fullgraph=True, backend=compiler)(x)
    assert_norm_matches_float64(y, sample.of(hidden))
    assert same_bits(y, y_of_copy)


# ---------------------------------------------------------------------------------- dynamic shapes


def results(call, sample):
    return call(*sample), *FWD(*sample)


@call_by_either_way
def test_case_45_any_number_of_rows_takes_at_most_two_compiles(call, device, fresh_compiler):
    counting, graphs = counting_backend()
    compiled = torch.compile(results, backend=counting, fullgraph=True, dynamic=True)
    for rows in (2, 3, 4, 5, 6, 7, 8, 64):
        sample = norm_inputs(torch.float32, device, (rows, 33))
        assert all(same_bits(a, b) for a, b in zip(compiled(call, sample), results(call, sample), strict=True))
    assert 1 <= len(graphs) <= 2
    for rows in (0, 1):
        sample = norm_inputs(torch.float32, device, (rows, 33))
        assert all(same_bits(a, b) for a, b in zip(compiled(call, sample), results(call, sample), strict=True))


def test_rows_marked_by_growing_batches_take_at_most_two_compiles(device, fresh_compiler):
    counting, graphs = counting_backend()
    compiled = torch.compile(results, backend=counting, fullgraph=True)
    for rows in (4, 5, 6, 7, 8):
        sample = norm_inputs(torch.float32, device, (rows, 33))
        assert all(
            same_bits(a, b)
            for a, b in zip(compiled(fastln.layer_norm, sample), results(fastln.layer_norm, sample), strict=True)
        )
    assert 1 <= len(graphs) <= 2


@call_by_either_way
def test_any_number_of_columns_takes_at_most_two_compiles(call, fresh_compiler):
    counting, graphs = counting_backend()

    def over_the_last_dimension(x, weight, bias):
        return call(x, x.shape[-1:], weight, bias)

    compiled = torch.compile(over_the_last_dimension, backend=counting, fullgraph=True, dynamic=True)
    for cols in range(2, 9):
        x, _, weight, bias, _ = norm_inputs(torch.float32, "cpu", (3, cols))
        assert same_bits(compiled(x, weight, bias), call(x, [cols], weight, bias))
    assert 1 <= len(graphs) <= 2


# ------------------------------------------------------------------------------------------ export


class Model(torch.nn.Module):
    """A module that calls layer_norm, to be exported."""

    def __init__(self, call, sample):
        super().__init__()
        self.call, self.shape = call, sample.normalized_shape
        self.weight, self.bias = torch.nn.Buffer(sample.weight), torch.nn.Buffer(sample.bias)

    def forward(self, x):
        return self.call(x, self.shape, self.weight, self.bias)


class OfSelectedRows(Model):
    """Rows picked by a mask: their number is known at run time alone."""

    def forward(self, x, mask):
        return super().forward(x[mask.nonzero().squeeze(-1)])


def calls_the_op(program):
    return any(node.target is OP.default for node in program.graph.nodes)


@call_by_either_way
def test_case_44_export_with_a_number_of_rows_from_nonzero(call, device):
    sample = norm_inputs(torch.float32, device, (6, 33))
    mask = torch.tensor([1, 0, 1, 1, 0, 0], device=device)
    program = torch.export.export(OfSelectedRows(call, sample), (sample.input, mask), strict=False)
    assert calls_the_op(program)
    for picked in (mask, 1 - mask, torch.ones_like(mask), torch.zeros_like(mask)):
        rows = sample.input[picked.nonzero().squeeze(-1)]
        assert same_bits(program.module()(sample.input, picked), call(*sample.of(rows)))


def test_layer_norm_fwd_exports_with_a_number_of_rows_from_nonzero(device):
    sample = norm_inputs(torch.float32, device, (6, 33))
    mask = torch.tensor([1, 0, 1, 1, 0, 0], device=device)
    fwd = OfSelectedRows(lambda *arguments: FWD(*arguments, 1e-5), sample)
    program = torch.export.export(fwd, (sample.input, mask), strict=False)
    for picked in (mask, torch.ones_like(mask), torch.zeros_like(mask)):
        expected = FWD(*sample.of(sample.input[picked.nonzero().squeeze(-1)]))
        assert all(same_bits(a, b) for a, b in zip(program.module()(sample.input, picked), expected, strict=True))


@call_by_either_way
def test_export_with_a_dynamic_number_of_rows(call):
    sample = norm_inputs(torch.float32, "cpu", (6, 33))
    dynamic = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(Model(call, sample), (sample.input,), dynamic_shapes=dynamic)
    assert calls_the_op(program)
    for rows in (2, 5, 128):
        other = norm_inputs(torch.float32, "cpu", (rows, 33), seed=rows)
        assert same_bits(program.module()(other.input), call(*sample.of(other.input)))


@call_by_either_way
def test_vmap_gives_the_rows_of_the_batched_call(call, device):
    sample = norm_inputs(torch.float32, device, (4, 3, 33))
    with torch.no_grad():
        assert same_bits(torch.func.vmap(lambda t: call(*sample.of(t)))(sample.input), call(*sample))
