"""fastln in compiled models: who computes the layer norm, what surrounds it, shapes that change, torch.func."""

import re

import pytest
import torch
import torch.nn.functional as F
from fresh import process, python
from module_support import pair
from norm_support import CALLS, FWD, assert_norm_matches_float64, dtype_id, norm_inputs
from reference import same_bits
from shared import counting_backend
from torch import nn

import fastln

MIXTURES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float16, torch.float16, torch.float16),
    (torch.float16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float32, torch.float16, torch.float64),
    (torch.float64, torch.float32, torch.float32),
    (torch.float32, None, torch.float32),
    (torch.float32, None, None),
]


@pytest.fixture
def mode(fresh_compiler):
    """fastln.set_compile_mode, which is undone after the test."""
    before = fastln.compile_mode()
    fastln.set_compile_mode("op", "op")
    yield fastln.set_compile_mode
    fastln.set_compile_mode(*before)


def calls(graphs):
    """The layer norms in the graphs, as words of the mode."""
    names = [str(n.target) for g in graphs for n in g.graph.nodes if n.op == "call_function"]
    return ["op" if "fastln" in name else "inductor" for name in names if "layer_norm" in name]


def run(compiled, sample, grad):
    leaf = sample.input.clone().requires_grad_(grad)
    return compiled(*sample.of(leaf)).detach()


# -------------------------------------------------------------------------------------------- the mode


def test_modes_are_told_and_given_back(mode):
    assert fastln.compile_mode() == ("op", "op")
    before = mode(training="inductor")
    assert (before, fastln.compile_mode()) == (("op", "op"), ("op", "inductor"))
    mode(inference="inductor")
    assert fastln.compile_mode() == fastln.CompileMode(inference="inductor", training="inductor")
    mode(*before)
    assert fastln.compile_mode() == ("op", "op")


def test_a_mode_of_another_name_is_refused_and_changes_nothing(mode):
    with pytest.raises(
        ValueError, match=r'^fastln\.set_compile_mode: expected training to be "op" or "inductor", got '
    ):
        mode("inductor", "eager")
    assert fastln.compile_mode() == ("op", "op")


@pytest.mark.parametrize("inference", ["op", "inductor"])
@pytest.mark.parametrize("training", ["op", "inductor"])
def test_each_direction_has_its_own_mode(inference, training, mode):
    mode(inference, training)
    backend, graphs = counting_backend()
    compiled = torch.compile(fastln.layer_norm, backend=backend, fullgraph=True)
    sample = norm_inputs(torch.float32, "cpu", (5, 33))
    run(compiled, sample, grad=False)
    assert calls(graphs) == [inference]
    run(compiled, sample, grad=True)
    assert calls(graphs) == [inference, training]
    with torch.no_grad():
        run(compiled, sample, grad=True)
    assert calls(graphs) == [inference, training, inference]


def test_compiled_code_follows_a_change(mode):
    backend, graphs = counting_backend()
    compiled = torch.compile(fastln.layer_norm, backend=backend, fullgraph=True)
    sample = norm_inputs(torch.float32, "cpu", (5, 33))
    for inference in ("op", "inductor", "op"):
        mode(inference)
        run(compiled, sample, grad=False)
    assert calls(graphs) == ["op", "inductor"]


@pytest.mark.parametrize("dtypes", MIXTURES, ids=lambda m: "_".join("none" if d is None else dtype_id(d) for d in m))
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inductor_takes_every_mixture_of_dtypes_that_the_op_takes(dtypes, compiler, mode, request):
    if compiler == "inductor":
        request.getfixturevalue("inductor")
    mode("inductor", "inductor")
    sample = norm_inputs(dtypes[0], "cpu", (5, 33)).in_dtypes(*dtypes[1:])
    compiled = torch.compile(fastln.layer_norm, backend=compiler, fullgraph=True)
    for grad in (False, True):
        assert_norm_matches_float64(run(compiled, sample, grad), sample)


def test_the_bare_op_is_never_left_to_inductor(mode):
    mode("inductor", "inductor")
    backend, graphs = counting_backend()
    compiled = torch.compile(lambda *a: torch.ops.fastln.layer_norm(*a), backend=backend, fullgraph=True)
    run(compiled, norm_inputs(torch.float32, "cpu", (5, 33)), grad=False)
    assert calls(graphs) == ["op"]


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_always_has_the_op(strict, mode):
    mode("inductor", "inductor")
    program = torch.export.export(pair(33)[1], (torch.randn(5, 33),), strict=strict)
    assert torch.ops.fastln.layer_norm.default in {node.target for node in program.graph.nodes}


BAD = {
    "input_dtype": lambda x, w: fastln.layer_norm(x.int(), [33], w),
    "last_dimension": lambda x, w: fastln.layer_norm(x, [32], w),
    "no_shape": lambda x, w: fastln.layer_norm(x, [], w),
    "too_many_dimensions": lambda x, w: fastln.layer_norm(x, [2, 5, 33], w),
    "weight_shape": lambda x, w: fastln.layer_norm(x, [33], w[:32]),
    "weight_dtype": lambda x, w: fastln.layer_norm(x, [33], w.int()),
    "bias_shape": lambda x, w: fastln.layer_norm(x, [33], w, x),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
@pytest.mark.parametrize("choice", ["op", "inductor"])
def test_bad_input_is_refused_in_the_words_of_eager(call, choice, mode):
    mode(choice, choice)
    x, weight = torch.randn(5, 33), torch.randn(33)
    with pytest.raises(RuntimeError) as eager:
        call(x, weight)
    assert str(eager.value).startswith("fastln::layer_norm: expected ")
    with pytest.raises(Exception, match=re.escape(str(eager.value))):
        torch.compile(call, backend="eager", fullgraph=True)(x, weight)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("op", ("op", "op")),
        ("inductor", ("inductor", "inductor")),
        ("inference=inductor,training=op", ("inductor", "op")),
        ("inference=op", ("op", "op")),
        ("training=inductor", ("inductor", "inductor")),
    ],
)
def test_the_environment_sets_the_mode(text, expected):
    assert python("import fastln; print(*fastln.compile_mode())", FASTLN_COMPILE=text).split() == list(expected)


def test_unless_told_otherwise_inference_is_left_to_inductor_and_training_is_not():
    code = "import os; os.environ.pop('FASTLN_COMPILE', None); import fastln; print(*fastln.compile_mode())"
    assert python(code).split() == ["inductor", "op"]


@pytest.mark.parametrize("text", ["", "triton", "inference", "backward=op", "inference=op,training"])
def test_a_wrong_environment_is_refused_at_import(text):
    done = process("import fastln", FASTLN_COMPILE=text)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        'ValueError: fastln: expected FASTLN_COMPILE to be "op", "inductor" or "inference=inductor,training=op", '
        f'got "{text}"'
    )


# ------------------------------------------------------------------------------------------ the module


@pytest.mark.parametrize("choice", ["op", "inductor"])
def test_case_45_a_module_in_training_takes_at_most_two_compiles(choice, mode, device):
    mode(choice, choice)
    backend, graphs = counting_backend()
    stock, ours = pair(33, device)
    compiled = torch.compile(ours, backend=backend, fullgraph=True, dynamic=True)
    for rows in (2, 3, 4, 5, 8, 64, 0, 1):
        x = norm_inputs(torch.float32, device, (rows, 33)).input.requires_grad_()
        y = compiled(x)
        y.sum().backward()
        torch.testing.assert_close(y, stock(x), rtol=1e-5, atol=1e-5)
        if rows == 64:
            assert 1 <= len(graphs) <= 2
    assert set(calls(graphs)) == {choice}


@pytest.mark.parametrize("choice", ["op", "inductor"])
def test_works_inside_torch_func_transforms(choice, mode):
    mode(choice, choice)
    sample = norm_inputs(torch.float32, "cpu", (4, 33))

    def loss(norm):
        return lambda x, weight, bias: norm(x, [33], weight, bias).pow(3).sum()

    arguments = sample.input, sample.weight, sample.bias
    transforms = {
        "grad": lambda norm: torch.func.grad(loss(norm), argnums=(0, 1, 2)),
        "vmap": lambda norm: lambda x, w, b: (torch.func.vmap(lambda t: norm(t, [33], w, b))(x),),
        "per_sample": lambda norm: (
            lambda x, w, b: (torch.func.vmap(torch.func.grad(loss(norm)), in_dims=(0, None, None))(x, w, b),)
        ),
    }
    for transform in transforms.values():
        compiled = torch.compile(transform(fastln.layer_norm), backend="aot_eager", fullgraph=True)
        for got, expected in zip(compiled(*arguments), transform(F.layer_norm)(*arguments), strict=True):
            relative = 1e-5 * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=relative)


def transforms_of(norm, weight, bias):
    """Derivatives by torch.func of a loss through norm(x, [8], weight, bias), up to the third."""
    grad, jvp = torch.func.grad, torch.func.jvp

    def by_x(x):
        return norm(x, [8], weight, bias)

    def loss(x):
        return by_x(x).sin().sum()

    return {
        "grad": grad(loss),
        "grad_of_parameter": lambda x: grad(lambda w: norm(x, [8], w, bias).sin().sum())(weight),
        "third": lambda x: grad(lambda x: grad(lambda x: grad(loss)(x).pow(2).sum())(x).pow(2).sum())(x),
        "jvp": lambda x: jvp(by_x, (x,), (x.cos(),))[1],
        "grad_of_jvp": lambda x: grad(lambda x: jvp(by_x, (x,), (x.cos(),))[1].sin().sum())(x),
        "jacfwd": torch.func.jacfwd(by_x),
        "hessian": torch.func.hessian(loss),
    }


def written_out(x, shape, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias


@pytest.mark.parametrize("transform", transforms_of(None, None, None))
@pytest.mark.parametrize("choice", [("inductor", "op"), ("op", "op"), ("inductor", "inductor")], ids="_".join)
def test_compiled_derivatives_by_torch_func_are_right_in_every_mode(choice, transform, mode):
    """Also where F.layer_norm's are not, and where it has none."""
    mode(*choice)
    sample = norm_inputs(torch.float64, "cpu", (3, 8))
    ours, formula = (transforms_of(f, sample.weight, sample.bias)[transform] for f in (fastln.layer_norm, written_out))
    got = torch.compile(ours, backend="aot_eager", fullgraph=True)(sample.input)
    torch.testing.assert_close(got, formula(sample.input), rtol=1e-9, atol=1e-9)


def tangent_of(norm, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.cos())
        return torch.autograd.forward_ad.unpack_dual(norm(dual)).tangent


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("choice", ["op", "inductor"])
@pytest.mark.parametrize("name", ["function", "op", "fwd"])
def test_compiled_forward_mode_is_right(name, choice, compiler, mode):
    """Within a graph torch enters its level without telling Python."""
    mode(choice, choice)
    sample = norm_inputs(torch.float64, "cpu", (3, 8))
    call = {**CALLS, "fwd": lambda *arguments: FWD(*arguments)[0]}[name]
    compiled = torch.compile(lambda x: tangent_of(lambda dual: call(*sample.of(dual)), x), backend=compiler)
    expected = tangent_of(lambda dual: written_out(*sample.of(dual)[:4]), sample.input)
    torch.testing.assert_close(compiled(sample.input), expected)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_forward_mode_through_an_op_without_a_rule_is_refused(compiler, mode):
    x = norm_inputs(torch.float32, "cpu", (3, 8)).input
    compiled = torch.compile(lambda x: tangent_of(torch.ops.fastln.layer_norm_f32, x), backend=compiler)
    with pytest.raises(Exception, match="expected no derivative by forward mode"):
        compiled(x)


def test_a_vmap_without_a_derivative_follows_the_mode(mode):
    mode("inductor", "op")
    backend, graphs = counting_backend()
    sample = norm_inputs(torch.float32, "cpu", (4, 3, 33))
    compiled = torch.compile(torch.func.vmap(lambda x: fastln.layer_norm(*sample.of(x))), backend=backend)
    torch.testing.assert_close(compiled(sample.input), fastln.layer_norm(*sample))
    assert calls(graphs) == ["inductor"]


# -------------------------------------------------------------------------- the code that Inductor writes


def written(function, *arguments):
    """Inductor's code for this call."""
    from torch._inductor.utils import run_and_get_code

    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(function, fullgraph=True), *arguments)
    (code,) = codes
    return code[code.index("def call(") : code.index("def benchmark_compiled_module")]


@pytest.mark.slow
def test_no_layout_of_the_input_is_copied_on_its_way_to_the_op(mode, inductor):
    x = torch.randn(6, 8, 33)
    layouts = {
        "contiguous": x,
        "transposed": x[0].t().contiguous().t(),
        "cut_out": x[..., 1:32],
        "expanded": x[:1].expand(5, 8, 33),
        "permuted": x.permute(1, 0, 2),
        "channels_last": x.view(2, 3, 8, 33).contiguous(memory_format=torch.channels_last),
    }
    for name, layout in layouts.items():
        torch.compiler.reset()
        code = written(lambda t: fastln.layer_norm(t, t.shape[-1:]), layout)
        assert code.count("torch.ops.fastln.layer_norm.default(") == 1, name
        assert "empty_strided" not in code, name
        assert "cpp_fused" not in code, name


@pytest.mark.slow
def test_nothing_stands_between_a_matrix_product_and_the_op(mode, inductor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), fastln.LayerNorm(48), nn.Linear(48, 32))
    code = written(model, torch.randn(6, 32))
    assert code.count("torch.ops.fastln.layer_norm.default(") == 1
    assert "cpp_fused" not in code


@pytest.mark.slow
def test_inductor_fuses_the_layer_norm_that_is_left_to_it(mode, inductor):
    mode("inductor", "inductor")
    sample = norm_inputs(torch.float32, "cpu", (5, 33))
    code = written(lambda x: fastln.layer_norm(x + 1, [33], sample.weight, sample.bias) * 2, sample.input)
    assert "fastln" not in code
    assert len(re.findall(r"cpp_fused\w*\(", code)) == 1


# ------------------------------------------------------------------------------------------------- GPU


@pytest.mark.slow
@pytest.mark.parametrize("compile_for", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("choice", ["op", "inductor"])
def test_a_compiled_block_trains_as_in_eager(compile_for, choice, mode, cuda, inductor):
    mode(choice, choice)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)).to(cuda)
    fastln.convert(model)
    compiled = torch.compile(model, mode=compile_for, fullgraph=True)
    for seed in range(4):  # graphs are captured on the second run
        x = norm_inputs(torch.float32, cuda, (16, 64), seed=seed).input
        results = []
        for function in (model, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            y.square().sum().backward()
            results.append([y.detach().clone(), leaf.grad.clone(), *(p.grad.clone() for p in model.parameters())])
        for got, expected in zip(*reversed(results), strict=True):
            # tensor cores may be used by one of the two
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.slow
def test_case_42_reduce_overhead_replays_with_new_values(mode, cuda, inductor):
    linear = nn.Linear(64, 64, device=cuda)

    def function(x, weight, bias):
        return fastln.layer_norm(linear(x), [64], weight, bias)

    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(5):
            sample = norm_inputs(torch.float32, cuda, (16, 64), seed=seed)
            arguments = sample.input, sample.weight, sample.bias
            assert same_bits(compiled(*arguments).clone(), function(*arguments))
