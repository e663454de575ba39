"""fastln.convert: every nn.LayerNorm of a model becomes ours in place, and back."""

import copy
import gc
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from module_support import copies, randomize
from norm_support import norm_inputs
from reference import same_bits
from shared import counting_backend
from torch import nn
from torch.nn.utils import parametrizations, parametrize

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


KINDS = {"layer_norm": lambda: nn.LayerNorm(33), "subclass": lambda: Labelled(33, "one")}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def parametrized_by_hand(module):
    return parametrize.register_parametrization(module, "weight", Twice())


PARAMETRIZE = {
    "by_hand": parametrized_by_hand,
    "weight_norm": lambda module: parametrizations.weight_norm(module, dim=None),
    "spectral_norm": parametrizations.spectral_norm,
}
ways = pytest.mark.parametrize("parametrized", PARAMETRIZE.values(), ids=PARAMETRIZE)


def assert_is(module, kind, parametrized=()):
    """Its class beneath the parametrizations, and that it runs and has parametrizations of these alone."""
    assert parametrize.type_before_parametrizations(module) is kind
    assert sorted(getattr(module, "parametrizations", ())) == sorted(parametrized)
    module(x_for()).sum().backward()


@kinds
@ways
@pytest.mark.parametrize("converted_first", [False, True])
def test_parametrizations_can_be_removed_from_a_converted_module(make, parametrized, converted_first):
    made, stock = make(), make()
    first, then = (fastln.convert, parametrized) if converted_first else (parametrized, fastln.convert)
    first(made)
    then(made)
    parametrized(stock)
    assert isinstance(made, fastln.LayerNorm)
    parametrize.remove_parametrizations(made, "weight")
    parametrize.remove_parametrizations(stock, "weight")
    converted = type(made)
    assert issubclass(converted, (fastln.LayerNorm, type(stock)))
    assert_is(made, converted)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in stock.named_parameters()]


@kinds
@ways
@pytest.mark.parametrize("remove", ["before undo", "after undo"])
def test_undo_goes_back_beneath_parametrizations_that_came_later(make, parametrized, remove):
    made = make()
    before = type(made)
    conversion = fastln.convert(made)
    parametrized(made)
    if remove == "before undo":
        parametrize.remove_parametrizations(made, "weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conversion.undo()
    assert not isinstance(made, fastln.LayerNorm)
    if remove == "after undo":
        assert_is(made, before, ["weight"])
        parametrize.remove_parametrizations(made, "weight")
    assert_is(made, before)
    assert type(made) is before


@kinds
def test_undo_keeps_what_became_of_the_parametrizations(make):
    made = parametrized_by_hand(make())
    plain, before = type(make()), type(made)
    fastln.convert(made).undo()
    assert type(made) is before

    conversion = fastln.convert(made)
    parametrize.register_parametrization(made, "bias", Twice())
    conversion.undo()
    assert not isinstance(made, fastln.LayerNorm)
    assert_is(made, plain, ["bias", "weight"])

    conversion = fastln.convert(made)
    parametrize.remove_parametrizations(made, "weight")
    conversion.undo()
    assert_is(made, plain, ["bias"])

    conversion = fastln.convert(made)
    parametrize.remove_parametrizations(made, "bias")
    parametrize.register_parametrization(made, "weight", Twice())
    conversion.undo()
    assert_is(made, plain, ["weight"])
    parametrize.remove_parametrizations(made, "weight")
    assert type(made) is plain


@kinds
def test_a_copy_of_a_converted_parametrized_module_is_one(make):
    made = parametrized_by_hand(make())
    conversion = fastln.convert(made)
    other = copy.deepcopy(made)
    assert isinstance(other, fastln.LayerNorm)
    assert same_bits(other(x_for()).detach(), made(x_for()).detach())
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):  # as torch has it
        pickle.dumps(made)
    conversion.undo()
    assert same_bits(other(x_for()).detach(), made(x_for()).detach())
    parametrize.remove_parametrizations(made, "weight")
    assert_is(other, parametrize.type_before_parametrizations(other), ["weight"])
    parametrize.remove_parametrizations(other, "weight")
    assert isinstance(other, fastln.LayerNorm)


def test_classes_are_forgotten_with_their_modules():
    def class_of_one(make):
        made = make()
        conversion = fastln.convert(made)
        kind = weakref.ref(type(made))
        conversion.undo()
        return kind

    def local():
        class Own(nn.LayerNorm):
            pass

        return Own(33)

    known = [class_of_one(make) for make in (lambda: parametrized_by_hand(nn.LayerNorm(33)), local) for _ in range(3)]
    gc.collect()
    assert [kind() for kind in known] == [None] * 6


def test_a_converted_subclass_is_made_with_the_arguments_of_the_subclass():
    made = nn.Sequential(Labelled(33, "one"), Labelled(33, "two"))
    fastln.convert(made)
    assert type(made[0]) is type(made[1])
    assert type(made[0])(33, "three").label == "three"


def test_undo_leaves_a_module_whose_class_has_changed_since_with_a_warning():
    made = model()
    conversion = fastln.convert(made)
    made[0].norm.__class__ = type("Sharded", (fastln.LayerNorm,), {})  # as fully_shard does it
    with pytest.warns(UserWarning, match=r"cannot undo 0\.norm: expected LayerNorm, .*, got Sharded"):
        conversion.undo()
    assert isinstance(made[0].norm, fastln.LayerNorm)
    assert {type(m) for m in norms(made)[1:]} == {nn.LayerNorm}


def test_numbers_of_numpy_become_those_of_python_until_undo(fresh_compiler):
    shape, eps = (np.int64(33),), np.float64(1e-3)
    made = nn.Sequential(nn.LayerNorm(shape, eps=eps), nn.LayerNorm(33, eps=eps))
    given = made[0].normalized_shape
    expected = made(x_for())
    conversion = fastln.convert(made)
    assert [type(made[0].normalized_shape[0]), type(made[0].eps), type(made[1].eps)] == [int, float, float]
    torch.testing.assert_close(torch.compile(made, backend=counting_backend()[0], fullgraph=True)(x_for()), expected)
    made[1].eps = 1e-2  # set meanwhile, so it stays
    conversion.undo()
    assert made[0].normalized_shape is given
    assert made[0].eps is eps
    assert made[1].eps == 1e-2


# ---------------------------------------------------------------------------------------------- errors


class Final(nn.LayerNorm):
    """A class that allows no subclass."""

    def __init_subclass__(cls):
        raise TypeError("this class is final")


def test_a_class_that_allows_no_subclass_is_skipped_with_the_reason():
    made = nn.Sequential(nn.LayerNorm(33), Final(33), nn.LayerNorm(33))
    with pytest.warns(UserWarning, match=r"skipped \S+\.Final at 1: its class cannot be exchanged: .*is final"):
        conversion = fastln.convert(made)
    assert conversion.count == 2
    assert [s.path for s in conversion.skipped] == ["1"]
    assert type(made[1]) is Final
    conversion.undo()
    assert [type(m) for m in made] == [nn.LayerNorm, Final, nn.LayerNorm]


def test_after_an_error_the_model_is_as_it_was():
    class Interrupts(nn.LayerNorm):
        def __init_subclass__(cls):
            raise KeyboardInterrupt

    made = nn.Sequential(nn.LayerNorm(33, eps=np.float64(1e-3)), Interrupts(33))
    with pytest.raises(KeyboardInterrupt):
        fastln.convert(made)
    assert type(made[0]) is nn.LayerNorm
    assert type(made[0].eps) is np.float64

    made = nn.Sequential(nn.LayerNorm(33), Scaled(33))
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="skipped"):
        warnings.simplefilter("error")
        fastln.convert(made)
    assert type(made[0]) is nn.LayerNorm

    made = model()
    conversion = fastln.convert(made)
    made[0].norm.__class__ = type("Sharded", (fastln.LayerNorm,), {})
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="cannot undo"):
        warnings.simplefilter("error")
        conversion.undo()
    assert {type(m) for m in norms(made)[1:]} == {nn.LayerNorm}


class PlainChild(Plain):
    """One that has its parent's forward."""


class PlainGrandchild(PlainChild):
    """And one that has its grandparent's."""


class OwnAgain(PlainChild):
    """One that has another."""

    def forward(self, x):
        return -super().forward(x)


@pytest.mark.parametrize(
    "also, converted",
    [([Plain], [0, 1, 2]), ([PlainChild], [1, 2]), ([PlainGrandchild], [2]), ([OwnAgain], [3]), ([Labelled], [])],
)
def test_also_counts_for_subclasses_with_the_same_forward(also, converted):
    made = nn.Sequential(Plain(33), PlainChild(33), PlainGrandchild(33), OwnAgain(33))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conversion = fastln.convert(made, also=also)
    assert [i for i, m in enumerate(made) if isinstance(m, fastln.LayerNorm)] == converted
    conversion.undo()
    assert [type(m) for m in made] == [Plain, PlainChild, PlainGrandchild, OwnAgain]


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"^fastln\.convert: expected an nn\.Module, got dict$"):
        fastln.convert(dict(model().state_dict()))
    with pytest.raises(TypeError, match=r"expected subclasses of nn\.LayerNorm in also, got <class '.*Linear'>"):
        fastln.convert(model(), also=[nn.Linear])
    for also in (Plain, None, 3):
        with pytest.raises(TypeError, match=r"expected also to be a sequence of subclasses of nn\.LayerNorm, .*, got "):
            fastln.convert(model(), also=also)


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
