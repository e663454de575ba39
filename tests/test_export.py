"""torch.export and AOTInductor: programs that hold our op, in another process and in one without Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fresh import ROOT, process, python
from module_support import pair, randomize
from needs import require_loadable_packages
from norm_support import norm_inputs
from reference import same_bits
from torch import nn

import fastln

OP = torch.ops.fastln.layer_norm.default
LIBRARY = Path(fastln.__file__).with_name("libfastln.so")
EXAMPLE = ROOT / "examples" / "aot_cpp"


def model(width=33):
    """A small model with our op in it."""
    made = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.LayerNorm(width, bias=False))
    fastln.convert(randomize(made))
    return made.eval()


def ops_of(program):
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("strict", [True, False])
def test_a_converted_model_exports_and_computes_the_same(strict, device):
    made = model().to(device)
    rows = {0: torch.export.Dim("rows", min=1, max=1024)}
    x = norm_inputs(torch.float32, device, (5, 33)).input
    program = torch.export.export(made, (x,), dynamic_shapes=(rows,), strict=strict)
    assert ops_of(program).count(OP) == 2
    for count in (1, 5, 64):
        x = norm_inputs(torch.float32, device, (count, 33), seed=count).input
        assert same_bits(program.module()(x).detach(), made(x).detach())


def test_decompositions_leave_the_op_alone():
    program = torch.export.export(model(), (torch.randn(5, 33),)).run_decompositions()
    assert ops_of(program).count(OP) == 2
    assert torch.ops.aten.native_layer_norm.default not in ops_of(program)


class OfChosenRows(nn.Module):
    """A norm of rows whose number only the data tell."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, mask):
        return self.norm(x[mask.nonzero().squeeze(-1)]) + 1


def test_case_44_a_module_exports_with_a_number_of_rows_from_nonzero(device):
    _, ours = pair(33, device)
    x = norm_inputs(torch.float32, device, (6, 33)).input
    mask = torch.tensor([1, 0, 1, 1, 0, 0], device=device)
    for strict in (True, False):
        program = torch.export.export(OfChosenRows(ours), (x, mask), strict=strict)
        for picked in (mask, 1 - mask, torch.ones_like(mask), torch.zeros_like(mask)):
            expected = ours(x[picked.bool()]) + 1
            assert same_bits(program.module()(x, picked).detach(), expected.detach())


def test_case_44_a_module_compiles_with_a_number_of_rows_from_nonzero(device, fresh_compiler):
    _, ours = pair(33, device)
    x = norm_inputs(torch.float32, device, (6, 33)).input
    mask = torch.tensor([1, 0, 1, 1, 0, 0], device=device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(OfChosenRows(ours), backend="aot_eager", fullgraph=True)
        for picked in (mask, torch.ones_like(mask)):
            y = compiled(x, picked)
            torch.testing.assert_close(y, ours(x[picked.bool()]) + 1)
            y.sum().backward()


# --------------------------------------------------------------------------------------- another process


@pytest.fixture
def saved(tmp_path):
    """A program in a file, beside an input and what the model makes of it."""
    made, x = model(), norm_inputs(torch.float32, "cpu", (5, 33)).input
    torch.export.save(torch.export.export(made, (x,)), tmp_path / "program.pt2")
    torch.save((x, made(x).detach()), tmp_path / "values.pt")
    return tmp_path


LOAD = """
    import torch
    program = torch.export.load(FOLDER + "/program.pt2")
    x, expected = torch.load(FOLDER + "/values.pt")
    assert torch.equal(program.module()(x), expected)
"""


def test_case_46_a_saved_program_runs_in_a_process_that_has_imported_fastln(saved):
    python("import fastln", f"FOLDER = {str(saved)!r}", LOAD)


def test_case_46_without_the_import_the_error_names_the_op(saved):
    done = process(f"FOLDER = {str(saved)!r}", LOAD)
    assert done.returncode != 0
    assert "torch.ops.fastln.layer_norm.default" in done.stderr
    assert "import the custom op" in done.stderr


# ----------------------------------------------------------------------------------------- AOTInductor


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    """The package that the example's script makes on a device, and what it says the program should print."""
    known = {}

    def on(device):
        if device.type not in known:
            if shutil.which(os.environ.get("CXX", "g++")) is None:
                pytest.skip("AOTInductor needs a C++ compiler")
            package = tmp_path_factory.mktemp(device.type) / "model.pt2"
            script = [sys.executable, EXAMPLE / "export_model.py", package, device.type]
            done = subprocess.run(script, cwd="/", capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            known[device.type] = package, float(done.stdout)
        return known[device.type]

    return on


@pytest.mark.slow
def test_a_package_runs_in_a_process_that_has_imported_fastln(packaged, device):
    require_loadable_packages(device)
    package, expected = packaged(device)
    said = python(
        f"""
        import torch, fastln
        model = torch._inductor.aoti_load_package({str(package)!r})
        for rows in (1, 3, 64):
            print(model(torch.ones(rows, 16, device={device.type!r})).abs().sum().item())
        """
    ).split()
    for rows, total in zip((1, 3, 64), said, strict=True):
        assert float(total) == pytest.approx(rows / 3 * expected, rel=1e-5)


@pytest.mark.slow
def test_without_the_import_a_package_names_the_op_that_it_lacks(packaged, device):
    package, _ = packaged(device)
    done = process(f"import torch._inductor.codecache; torch._inductor.aoti_load_package({str(package)!r})")
    assert done.returncode != 0
    assert "fastln::layer_norm" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_package_runs_in_c_plus_plus_without_python(packaged, device, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    package, expected = packaged(device)
    folder = shutil.copytree(EXAMPLE, tmp_path / "example")
    done = subprocess.run(["make", "-C", folder, f"PYTHON={sys.executable}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rows in (1, 3, 64):
        run = [folder / "run", LIBRARY, package, str(rows), "16"]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) == pytest.approx(rows / 3 * expected, rel=1e-5)


# --------------------------------------------------------------------------------- forward and backward


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model()

    def forward(self, x):
        return (self.model(x).square().sum(),)


def test_forward_and_backward_export_together():
    from torch._functorch.aot_autograd import aot_export_module

    graph, signature = aot_export_module(Loss(), (torch.randn(5, 33),), trace_joint=True, output_loss_index=0)
    ops = [node.target for node in graph.graph.nodes]
    assert ops.count(torch.ops.fastln.layer_norm_fwd.default) == 2
    assert ops.count(torch.ops.fastln.layer_norm_bwd.default) == 2
    assert len(signature.backward_signature.gradients_to_parameters) == len(list(Loss().parameters()))


def test_a_backward_is_exported_from_an_exported_program():
    from torch.export.experimental import _export_forward_backward

    class Scalar(Loss):
        def forward(self, x):
            return super().forward(x)[0]

    program = _export_forward_backward(torch.export.export(Scalar(), (torch.randn(5, 33),)))
    assert ops_of(program).count(torch.ops.fastln.layer_norm_bwd.default) == 2


# ------------------------------------------------------------------------------------- torch's own op


NEGATIVE = """
    import torch
    import torch.nn.functional as F
    import fastln

    class OfAConjugate(torch.nn.Module):
        def forward(self, x):
            return F.layer_norm(x.conj().imag, x.shape[-1:])

    def complex_rows(width):
        return torch.randn(4, width, dtype=torch.complex64)
"""


def test_torchs_own_layer_norm_of_a_negative_view_keeps_its_dynamic_shapes():
    """Ours stand behind it for such tensors (src/bindings_autograd.cpp), and know sizes as plain integers alone."""
    python(
        NEGATIVE,
        """
        widths = {1: torch.export.Dim("width", min=2, max=100)}
        program = torch.export.export(OfAConjugate(), (complex_rows(8),), dynamic_shapes=(widths,))
        for width in (2, 9, 100):
            x = complex_rows(width)
            torch.testing.assert_close(program.module()(x), F.layer_norm(-x.imag, [width]))
        """,
    )


def test_torchs_own_layer_norm_of_a_negative_view_compiles_once_for_every_width():
    python(
        NEGATIVE,
        """
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        from torch._dynamo.backends.common import aot_autograd
        for requires_grad in (False, True):
            torch._dynamo.reset()
            graphs.clear()
            forward = aot_autograd(fw_compiler=backend, bw_compiler=lambda graph, inputs: graph.forward)
            compiled = torch.compile(OfAConjugate(), backend=forward, dynamic=True, fullgraph=True)
            for width in (8, 9, 10, 11, 12):
                x = complex_rows(width).requires_grad_(requires_grad)
                y = compiled(x)
                torch.testing.assert_close(y, F.layer_norm(-x.imag, [width]))
                if requires_grad:
                    (got,) = torch.autograd.grad(y.square().sum(), x)
                    (expected,) = torch.autograd.grad(F.layer_norm(-x.imag, [width]).square().sum(), x)
                    torch.testing.assert_close(got, expected)
            assert len(graphs) == 1, len(graphs)
        """,
    )
