"""Real models with random weights: converted or under override, they agree with the stock ones to rounding."""

import contextlib
import copy
import importlib.util
import sys

import pytest
import torch
from fresh import ROOT
from torch import nn

import fastln

if str(ROOT / "bench") not in sys.path:
    sys.path.insert(0, str(ROOT / "bench"))
import zoo

# How many layer norms the small models have: two a block, one behind, and in BERT two more around the blocks.
NORMS = {entry.name: 2 * zoo.SMALL.depth + (2 if "BERT" in entry.name else 1) for entry in zoo.ENTRIES}
PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}
precisions = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(params=zoo.ENTRIES, ids=lambda entry: entry.name.replace(" ", "_"))
def entry(request):
    if not request.param.is_installed():
        pytest.skip(f"needs {request.param.needs}, which is optional")
    return request.param


def make(entry, device, dtype):
    """The small model, with layer norms that are not the identity."""
    torch.manual_seed(0)
    model = entry.make(zoo.SMALL)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    return model.to(device, dtype)


def step(entry, model, autocast=None, compiled=None):
    """Logits in evaluation, logits in training, and all gradients, in float64 by name."""
    call = model if compiled is None else compiled
    parameter = next(model.parameters())
    x = entry.inputs(zoo.SMALL, parameter.device, parameter.dtype)

    def context():  # autocast keeps what it has cast, so that weights cast without grad would stay without
        return torch.autocast(parameter.device.type, autocast) if autocast else contextlib.nullcontext()

    model.zero_grad(set_to_none=True)
    model.eval()
    with context(), torch.no_grad():
        found = {"evaluation": zoo.logits(call, x)}
    model.train()
    with context():
        found["training"] = zoo.logits(call, x)
        loss = found["training"].float().square().mean()
    loss.backward()
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: t.detach().double() for name, t in found.items()}


def errors(found, exact):
    """Relative error of each tensor in the 2-norm."""
    assert list(found) == list(exact)
    return {name: ((t - exact[name]).norm() / exact[name].norm().clamp(min=1e-30)).item() for name, t in found.items()}


def assert_as_exact_as_stock(ours, stock, exact, precision):
    """Each tensor is no further from the float64 model than twice what stock's is, and a few roundings."""
    dtype, autocast = PRECISIONS[precision]
    floor = 8 * torch.finfo(autocast or dtype).eps
    off, usual = errors(ours, exact), errors(stock, exact)
    # A gradient that is nothing but rounding, as that of a key's bias, which softmax cancels, has no accuracy.
    wrong = {n: (e, usual[n]) for n, e in off.items() if usual[n] < 0.5 and not e <= 2 * usual[n] + floor}
    assert not wrong, wrong
    assert sum(u < 0.5 for u in usual.values()) > len(usual) * 2 / 3


@pytest.fixture
def variants(entry, device):
    """(stock's step, the float64 model's step, a model to change) of a precision."""

    def of(precision):
        dtype, autocast = PRECISIONS[precision]
        model = make(entry, device, dtype)
        stock = step(entry, model, autocast)
        exact = step(entry, copy.deepcopy(model).double())
        return stock, exact, model

    return of


@precisions
def test_converted_models_agree_with_stock(precision, entry, variants):
    stock, exact, model = variants(precision)
    with entry.convert(model) as conversion:
        assert conversion.count == NORMS[entry.name]
        assert conversion.skipped == []
        assert_as_exact_as_stock(step(entry, model, PRECISIONS[precision][1]), stock, exact, precision)


@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_compiled_converted_models_agree_with_stock(precision, entry, variants, fresh_compiler):
    stock, exact, model = variants(precision)
    entry.convert(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert_as_exact_as_stock(step(entry, model, PRECISIONS[precision][1], compiled), stock, exact, precision)


@precisions
def test_models_under_override_agree_with_stock(precision, entry, cuda):
    dtype, autocast = PRECISIONS[precision]
    model = make(entry, cuda, dtype)
    stock = step(entry, model, autocast)
    exact = step(entry, copy.deepcopy(model).double())
    with fastln.override():
        assert_as_exact_as_stock(step(entry, model, autocast), stock, exact, precision)


@pytest.mark.slow
@precisions
@pytest.mark.parametrize("choice", ["op", "inductor"])
def test_models_compiled_by_inductor_agree_with_stock(choice, precision, entry, cuda, inductor, fresh_compiler):
    dtype, autocast = PRECISIONS[precision]
    model = make(entry, cuda, dtype)
    stock = step(entry, model, autocast)
    exact = step(entry, copy.deepcopy(model).double())
    entry.convert(model)
    before = fastln.set_compile_mode(choice, choice)
    try:
        assert_as_exact_as_stock(step(entry, model, autocast, torch.compile(model)), stock, exact, precision)
    finally:
        fastln.set_compile_mode(*before)


def test_the_graphs_of_a_converted_model_do_not_break(entry, fresh_compiler):
    model = make(entry, "cpu", torch.float32)
    x = entry.inputs(zoo.SMALL, torch.device("cpu"), torch.float32)
    expected = torch._dynamo.explain(model)(x).graph_break_count
    torch.compiler.reset()
    entry.convert(model)
    assert torch._dynamo.explain(model)(x).graph_break_count <= expected


def test_the_models_that_need_torch_alone_are_always_tested():
    assert sum(entry.is_installed() for entry in zoo.ENTRIES) >= 2
    if importlib.util.find_spec("transformers"):
        assert sum(entry.is_installed() for entry in zoo.ENTRIES) >= 5
