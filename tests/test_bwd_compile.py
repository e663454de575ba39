"""A training step of fastln.layer_norm under torch.compile, compiled autograd, opcheck and torch.export."""

import pytest
import torch
from bwd_support import (
    ALL,
    BWD,
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
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from norm_support import CALLS, FWD, each, norm_inputs
from reference import same_bits
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fastln

call_by_either_way = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
PARTITIONS = {"default": default_partition, "min_cut": min_cut_rematerialization_partition}


def capturing(partition):
    """A backend that keeps the forward and backward graphs that AOTAutograd makes."""
    graphs = {"forward": [], "backward": []}

    def keep(kind):
        def compiler(graph, example_inputs):
            graphs[kind].append(graph)
            return make_boxed_func(graph.forward)

        return compiler

    partition_fn = {} if partition is None else {"partition_fn": partition}
    return aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"), **partition_fn), graphs


def our_ops(graph):
    return [n.target for n in graph.graph.nodes if getattr(n.target, "namespace", None) == "fastln"]


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
@call_by_either_way
def test_case_43_a_compiled_training_step_is_our_forward_and_our_backward(call, partition, device, fresh_compiler):
    plain, compiled = (leaves(norm_inputs(torch.float16, device, (7, 33)), "weight", "bias") for _ in range(2))
    backend, graphs = capturing(partition)
    expected = step(block(plain, call), plain.input)
    got = step(torch.compile(block(compiled, call), fullgraph=True, backend=backend), compiled.input)
    assert [our_ops(graph) for graph in graphs["forward"]] == [[FWD.default]]
    assert [our_ops(graph) for graph in graphs["backward"]] == [[BWD.default]]
    assert same_bits(got, expected)
    assert all_same(grads(compiled), grads(plain))


def test_case_43_three_layers_train_without_a_graph_break(device, fresh_compiler):
    def model():
        torch.manual_seed(0)
        return torch.nn.ModuleList(torch.nn.Linear(33, 33) for _ in range(3)).to(device)

    def loss(layers):
        def function(x):
            for layer in layers:
                x = x + fastln.layer_norm(layer(x), [33], layer.bias, layer.bias).relu()
            return x

        return function

    plain, compiled = model(), model()
    x = norm_inputs(torch.float32, device, (4, 33)).input
    backend, graphs = capturing(None)
    expected = step(loss(plain), x)
    got = step(torch.compile(loss(compiled), fullgraph=True, backend=backend), x)
    torch.testing.assert_close(got, expected)
    for a, b in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert [len(our_ops(graph)) for graph in graphs["forward"] + graphs["backward"]] == [3, 3]


@pytest.mark.parametrize("names", [("input",), ("weight",), ("bias",), ("input", "bias")], ids="_".join)
def test_compiled_code_asks_for_exactly_the_gradients_wanted(names, device, fresh_compiler):
    backend, graphs = capturing(None)
    sample = leaves(norm_inputs(torch.float32, device, (7, 33)), *names)
    torch.compile(fastln.layer_norm, fullgraph=True, backend=backend)(*sample).backward(upstream(sample))
    (mask,) = (n.args[-1] for n in graphs["backward"][0].graph.nodes if n.target is BWD.default)
    assert list(mask) == [name in names for name in TENSORS]
    assert_gradients_match_float64(grads(sample), upstream(sample), leaves(sample), names)


def test_compiled_training_steps_of_any_number_of_rows_take_at_most_two_compiles(device, fresh_compiler):
    backend, graphs = capturing(None)
    compiled = torch.compile(fastln.layer_norm, fullgraph=True, backend=backend, dynamic=True)
    for rows in (2, 3, 5, 8, 64):
        sample = leaves(norm_inputs(torch.float32, device, (rows, 33)), *TENSORS)
        compiled(*sample).backward(upstream(sample))
        assert all_same(grads(sample), backward(upstream(sample), leaves(sample)))
    assert 1 <= len(graphs["backward"]) <= 2


@pytest.mark.slow
@each(torch.float16, torch.float32)
def test_inductor_gives_the_gradients_of_eager(dtype, device, inductor, fresh_compiler):
    plain, compiled = (leaves(norm_inputs(dtype, device, (7, 33)), *TENSORS) for _ in range(2))
    dy = upstream(plain)
    fastln.layer_norm(*plain).backward(dy)
    torch.compile(fastln.layer_norm, fullgraph=True)(*compiled).backward(dy)
    assert all_same(grads(compiled), grads(plain))


@pytest.mark.parametrize("policy", [None, "save"])
def test_checkpoints_inside_compiled_code(policy, device, fresh_compiler):
    plain, kept = (leaves(norm_inputs(torch.float32, device, (7, 33)), "weight", "bias") for _ in range(2))
    options = {}
    if policy == "save":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts([FWD.default])

    def checkpointed(x):
        return checkpoint(block(kept), x, use_reentrant=False, **options)

    expected = step(block(plain), plain.input)
    got = step(torch.compile(checkpointed, fullgraph=True, backend="aot_eager"), kept.input)
    assert same_bits(got, expected)
    assert all_same(grads(kept), grads(plain))


def test_compiled_autograd_traces_the_backward(device, fresh_compiler):
    plain, compiled = (leaves(norm_inputs(torch.float32, device, (7, 33)), "weight", "bias") for _ in range(2))
    expected = step(block(plain), plain.input)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        got = step(block(compiled), compiled.input)
    assert same_bits(got, expected)
    assert all_same(grads(compiled), grads(plain))


def opcheck_samples(dtype, device):
    yield norm_inputs(dtype, device, (4, 33))
    yield norm_inputs(dtype, device, (2, 3, 4, 8), dims=2, eps=0.5).in_dtypes(torch.float32, None)
    sample = norm_inputs(dtype, device, (8, 5))
    yield sample.of(sample.input.t().contiguous().t()).in_dtypes(None, torch.float64)
    yield norm_inputs(dtype, device, (0, 8)).in_dtypes(None, None)


@each(torch.float16, torch.float64)
@pytest.mark.parametrize("mask", [ALL, (True, False, False), (False, True, True), (False,) * 3], ids=str)
def test_opcheck_layer_norm_bwd(dtype, mask, device):
    for sample in opcheck_samples(dtype, device):
        mean, rstd = FWD(*sample)[1:]
        x, shape, weight, bias, _ = sample
        torch.library.opcheck(BWD.default, (upstream(sample), x, shape, mean, rstd, weight, bias, list(mask)))


def test_an_exported_program_holds_the_backward_op(device):
    sample = norm_inputs(torch.float32, device, (7, 33))
    mean, rstd = FWD(*sample)[1:]

    class Backward(torch.nn.Module):
        def forward(self, dy, x, weight):
            return BWD(dy, x, [33], mean, rstd, weight, None, [True, True, False])[:2]

    arguments = (upstream(sample), sample.input, sample.weight)
    program = torch.export.export(Backward(), arguments, strict=False)
    assert any(node.target is BWD.default for node in program.graph.nodes)
    assert all_same(program.module()(*arguments), Backward()(*arguments))
