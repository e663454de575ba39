"""fastln.convert: every nn.LayerNorm of a model becomes ours in place, and back."""

import warnings

import pytest
import torch
from module_support import copies, randomize
from norm_support import norm_inputs
from reference import same_bits
from shared import counting_backend
from torch import nn
from torch.nn.utils import parametrize

import fastln


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, width, **options):
        super().__init__()
        self.norm = nn.LayerNorm(width, **options)
        self.linear = nn.Linear(width, width, **{k: v for k, v in options.items() if k in ("dtype", "device")})

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Scaled(nn.LayerNorm):
    """A layer norm with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


class Plain(nn.LayerNorm):
    """One whose own forward is the usual one."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Labelled(nn.LayerNorm):
    """A layer norm without a forward of its own."""

    def __init__(self, width, label):
        super().__init__(width)
        self.label = label


def model(width=33, depth=3, **options):
    return randomize(nn.Sequential(*(Block(width, **options) for _ in range(depth)), nn.LayerNorm(width, **options)))


def x_for(width=33, dtype=torch.float32):
    return norm_inputs(dtype, "cpu", (5, width)).input


def norms(module):
    return [m for m in module.modules() if isinstance(m, nn.LayerNorm)]


def test_case_49_converts_all_of_them_and_says_how_many():
    conversion = fastln.convert(made := model())
    assert conversion.count == 4
    assert conversion.skipped == []
    assert repr(conversion) == "<fastln.convert: 4 LayerNorm modules converted>"
    assert [type(m) for m in norms(made)] == [fastln.LayerNorm] * 4


def test_a_converted_model_computes_the_same_with_our_op(device):
    made = model().to(device)
    x = x_for().to(device)
    expected = made(x)
    expected.square().sum().backward()
    grads = [p.grad for p in made.parameters()]
    made.zero_grad(set_to_none=True)
    fastln.convert(made)
    y = made(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for parameter, grad in zip(made.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item())
    with torch.no_grad(), torch.profiler.profile() as profile:
        made(x)
    assert sum(event.name == "fastln::_layer_norm" for event in profile.events()) == 4


def test_undo_restores_the_model():
    made = model()
    expected = made(x_for())
    conversion = fastln.convert(made)
    conversion.undo()
    assert {type(m) for m in norms(made)} == {nn.LayerNorm}
    assert same_bits(made(x_for()).detach(), expected.detach())
    conversion.undo()  # once is enough, twice does no harm


def test_context_manager_undoes_after_an_error_too():
    made = model()
    with pytest.raises(ZeroDivisionError), fastln.convert(made) as conversion:
        assert conversion.count == 4
        assert {type(m) for m in norms(made)} == {fastln.LayerNorm}
        1 / 0  # noqa: B018
    assert {type(m) for m in norms(made)} == {nn.LayerNorm}


def test_a_second_conversion_finds_nothing_and_undoes_nothing():
    made = model()
    fastln.convert(made)
    again = fastln.convert(made)
    assert (again.count, again.skipped) == (0, [])
    again.undo()
    assert {type(m) for m in norms(made)} == {fastln.LayerNorm}


def test_the_model_may_be_a_layer_norm_itself():
    root = nn.LayerNorm(33)
    with fastln.convert(root) as conversion:
        assert conversion.count == 1
        assert type(root) is fastln.LayerNorm
    assert type(root) is nn.LayerNorm


def test_a_model_without_layer_norm_converts_nothing():
    assert fastln.convert(nn.Linear(3, 3)).count == 0


@pytest.mark.parametrize(
    "options", [{"bias": False}, {"elementwise_affine": False}, {"eps": 1e-3}, {"dtype": torch.half}]
)
def test_case_49_conversion_keeps_values_dtype_eps_and_mode(options):
    made = model(**options)
    made[1].eval()
    before = {k: v.clone() for k, v in made.state_dict().items()}
    facts = [(m.eps, m.training, m.normalized_shape, m.elementwise_affine) for m in norms(made)]
    identities = [id(t) for t in (*made.modules(), *made.parameters())]
    fastln.convert(made)
    assert list(made.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in made.state_dict().items())
    assert [(m.eps, m.training, m.normalized_shape, m.elementwise_affine) for m in norms(made)] == facts
    assert [id(t) for t in (*made.modules(), *made.parameters())] == identities


def test_conversion_keeps_the_device():
    made = model(device="meta")
    fastln.convert(made)
    assert all(p.is_meta for p in made.parameters())


def test_conversion_keeps_hooks_frozen_parameters_and_attributes():
    made = model()
    calls = []
    made[0].norm.register_forward_hook(lambda module, args, y: calls.append("forward"))
    made[0].norm.register_full_backward_hook(lambda module, gx, gy: calls.append("backward"))
    made[0].norm.weight.requires_grad_(False)
    made[0].norm.tag = "first"
    fastln.convert(made)
    made(x_for().requires_grad_()).sum().backward()
    assert calls == ["forward", "backward"]
    assert made[0].norm.weight.grad is None
    assert made[0].norm.bias.grad is not None
    assert made[0].norm.tag == "first"


def test_tied_modules_and_tied_parameters_stay_tied():
    made = model()
    made[1].norm = made[0].norm
    made[2].norm.weight = made[0].norm.weight
    conversion = fastln.convert(made)
    assert conversion.count == 3
    assert made[1].norm is made[0].norm
    assert made[2].norm.weight is made[0].norm.weight
    conversion.undo()
    assert type(made[1].norm) is nn.LayerNorm


def test_an_optimizer_made_before_goes_on_training():
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    fastln.convert(made)
    before = made[0].norm.weight.detach().clone()
    made(x_for()).square().mean().backward()
    optimizer.step()
    assert not torch.equal(made[0].norm.weight, before)


@copies
def test_copies_of_a_converted_model_are_converted(copied):
    made = nn.Sequential(model(), Labelled(33, "last"))
    fastln.convert(made)
    other = copied(made)
    assert all(isinstance(m, fastln.LayerNorm) for m in norms(other))
    assert isinstance(other[1], Labelled)
    assert other[1].label == "last"
    assert same_bits(other(x_for()).detach(), made(x_for()).detach())


# ------------------------------------------------------------------------------------------ subclasses


def test_a_subclass_with_its_own_forward_is_skipped_with_a_warning():
    made = nn.ModuleDict({"plain": nn.LayerNorm(33), "scaled": Scaled(33)})
    expected = made["scaled"](x_for())
    with pytest.warns(
        UserWarning, match=r"skipped \S+\.Scaled at scaled: its class has a forward of its own"
    ) as caught:
        conversion = fastln.convert(made)
    assert caught[0].filename == __file__
    assert conversion.count == 1
    assert [(s.path, s.kind) for s in conversion.skipped] == [("scaled", f"{__name__}.Scaled")]
    assert repr(conversion) == "<fastln.convert: 1 LayerNorm modules converted, 1 skipped>"
    assert type(made["scaled"]) is Scaled
    assert same_bits(made["scaled"](x_for()).detach(), expected.detach())


def test_one_warning_names_the_class_and_the_first_paths():
    with pytest.warns(UserWarning) as caught:
        fastln.convert(nn.Sequential(*(Scaled(3) for _ in range(5))))
    assert len(caught) == 1
    assert f"skipped {__name__}.Scaled at 0, 1, 2 and 2 more: " in str(caught[0].message)


def test_a_skipped_root_is_named_so():
    with pytest.warns(UserWarning, match=r"skipped \S+\.Scaled at the model itself"):
        fastln.convert(Scaled(3))


def test_a_forward_set_on_the_instance_is_skipped():
    made = model()
    made[0].norm.forward = lambda x: x
    with pytest.warns(UserWarning, match=r"skipped torch\.nn\.\S+\.LayerNorm at 0\.norm: a forward was set"):
        assert fastln.convert(made).count == 3


def test_a_subclass_that_the_caller_vouches_for_is_converted():
    made = nn.Sequential(Plain(33), Scaled(33))
    expected = made(x_for())
    with pytest.warns(UserWarning, match=r"skipped \S+\.Scaled at 1"):
        conversion = fastln.convert(made, also=[Plain])
    assert conversion.count == 1
    assert isinstance(made[0], Plain)
    assert isinstance(made[0], fastln.LayerNorm)
    torch.testing.assert_close(made(x_for()), expected)
    conversion.undo()
    assert type(made[0]) is Plain


def test_a_subclass_without_a_forward_stays_a_subclass():
    made = Labelled(33, "only")
    expected = made(x_for())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conversion = fastln.convert(made)
    assert conversion.count == 1
    assert isinstance(made, Labelled)
    assert isinstance(made, fastln.LayerNorm)
    assert (type(made).__name__, made.label) == ("Labelled", "only")
    torch.testing.assert_close(made(x_for()), expected)
    conversion.undo()
    assert type(made) is Labelled


class Twice(nn.Module):
    def forward(self, t):
        return 2 * t


def test_parametrized_weights_stay_parametrized():
    made = model()
    parametrize.register_parametrization(made[0].norm, "weight", Twice())
    expected = made(x_for())
    conversion = fastln.convert(made)
    assert parametrize.is_parametrized(made[0].norm, "weight")
    torch.testing.assert_close(made(x_for()), expected)
    conversion.undo()
    torch.testing.assert_close(made(x_for()), expected)


def test_undo_leaves_a_module_whose_class_has_changed_since_with_a_warning():
    made = model()
    conversion = fastln.convert(made)
    parametrize.register_parametrization(made[0].norm, "weight", Twice())
    with pytest.warns(UserWarning, match=r"cannot undo 0\.norm: expected LayerNorm, .*, got ParametrizedLayerNorm"):
        conversion.undo()
    assert isinstance(made[0].norm, fastln.LayerNorm)
    assert {type(m) for m in norms(made)[1:]} == {nn.LayerNorm}


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"^fastln\.convert: expected an nn\.Module, got dict$"):
        fastln.convert(dict(model().state_dict()))
    with pytest.raises(TypeError, match=r"expected subclasses of nn\.LayerNorm in also, got <class '.*Linear'>"):
        fastln.convert(model(), also=[nn.Linear])


# --------------------------------------------------------------------------------------------- compile


def ops_of(graphs):
    return [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]


def test_a_compiled_model_is_converted_once_its_graphs_are_made_anew(fresh_compiler):
    backend, graphs = counting_backend()
    made = model(depth=1)
    compiled = torch.compile(made, backend=backend, fullgraph=True)
    expected = compiled(x_for())
    assert "fastln.layer_norm.default" not in ops_of(graphs)
    with fastln.convert(compiled) as conversion:
        assert conversion.count == 2
        torch.compiler.reset()
        torch.testing.assert_close(compiled(x_for()), expected)
        assert ops_of(graphs[1:]).count("fastln.layer_norm.default") == 2
    torch.compiler.reset()
    assert same_bits(compiled(x_for()).detach(), expected.detach())
    assert len(graphs) == 3


def test_case_43_three_layers_compile_without_a_graph_break(fresh_compiler):
    made = model()
    fastln.convert(made)
    backend, graphs = counting_backend()
    compiled = torch.compile(made, backend=backend, fullgraph=True)
    compiled(x_for()).sum().backward()
    assert len(graphs) == 1
    assert ops_of(graphs).count("fastln.layer_norm.default") == 4


def test_also_may_be_any_iterable():
    class Own(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    assert fastln.convert(nn.Sequential(Own(8)), also=(kind for kind in [Own])).count == 1
