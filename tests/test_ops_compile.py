"""The ops under torch.library.opcheck, torch.compile and torch.export."""

import subprocess
import sys

import pytest
import torch
from reference import assert_matches_float64, same_bits, sample_inputs
from shared import counting_backend


def opcheck_samples(kernel, device):
    """Inputs that take different ways through checks and layouts."""
    yield sample_inputs(kernel, device, (4, 33))
    yield sample_inputs(kernel, device, (2, 3, 8), weight="float32", bias=None, eps=0.5)
    x = sample_inputs(kernel, device, (5, 8)).input.t()
    yield sample_inputs(kernel, device, (8, 5), weight=None)._replace(input=x)
    yield sample_inputs(kernel, device, (0, 8))


# All of opcheck's test_utils are run, on every overload.
def test_opcheck_default(kernel, device):
    for sample in opcheck_samples(kernel, device):
        torch.library.opcheck(kernel.op.default, sample)


def test_opcheck_scalar(kernel, device):
    for sample in opcheck_samples(kernel, device):
        torch.library.opcheck(kernel.op.scalar, (sample.input, 1.5, -0.5, sample.eps))


def test_opcheck_out(kernel, device):
    for sample in opcheck_samples(kernel, device):
        out = torch.empty(sample.input.shape, dtype=kernel.dtype, device=device)
        torch.library.opcheck(kernel.op.out, sample, {"out": out})


def block(kernel, x, weight, bias):
    """All three overloads between ops that a compiler may fuse or reorder."""
    y = kernel.op(x * 2, weight, bias)
    z = kernel.op.scalar(y + x, 1.5, 0.5)
    out = torch.empty_like(z)
    kernel.op.out(z, weight, bias, 1e-3, out=out)
    kernel.op.out(out + 1, weight, None, out=z)
    return y, out * 1, z.relu()


def test_compiled_code_gives_the_bits_of_eager(kernel, backend, device, fresh_compiler):
    sample = sample_inputs(kernel, device, (4, 33))[:3]
    expected = block(kernel, *sample)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    # Each op in between rounds once, so that fusing them changes no bit.
    assert all(same_bits(a, b) for a, b in zip(compiled(kernel, *sample), expected, strict=True))


def test_compiled_code_writes_into_the_callers_out(kernel, backend, device, fresh_compiler):
    sample = sample_inputs(kernel, device, (4, 33))
    out = torch.full_like(sample.input, 7.0)
    x = sample.input.clone()
    compiled = torch.compile(lambda *args, out: kernel.op.out(*args, out=out), fullgraph=True, backend=backend)
    compiled(*sample, out=out)
    assert same_bits(out, kernel.op(*sample))
    compiled(x, *sample[1:], out=x)
    assert same_bits(x, out)


def test_compiled_code_takes_every_layout(kernel, backend, device, fresh_compiler):
    """Inductor relies on the strides that the fake announces (40 in FAULTS.md)."""
    weight, bias = sample_inputs(kernel, device, (8,))[1:3]
    x = sample_inputs(kernel, device, (8, 8)).input
    compiled = torch.compile(
        lambda t: kernel.op(t, weight, bias).flatten() * 2, fullgraph=True, backend=backend, dynamic=False
    )
    for layout in (x.t(), x[::2], x[:1].expand(5, 8), x.view(2, 2, 2, 8).permute(1, 2, 0, 3)):
        assert same_bits(compiled(layout), kernel.op(layout, weight, bias).flatten() * 2)


def test_case_45_any_number_of_rows_takes_at_most_two_compiles(kernel, device, fresh_compiler):
    counting, graphs = counting_backend()
    weight, bias = sample_inputs(kernel, device, (33,))[1:3]

    def both(x):
        return kernel.op(x, weight, bias) + kernel.op.scalar(x, 1.5, 0.5)

    compiled = torch.compile(both, backend=counting, fullgraph=True, dynamic=True)
    for rows in (2, 3, 4, 5, 7, 8, 16, 33, 64):
        x = sample_inputs(kernel, device, (rows, 33)).input
        assert same_bits(compiled(x), both(x))
    assert 1 <= len(graphs) <= 2
    for rows in (0, 1):
        x = sample_inputs(kernel, device, (rows, 33)).input
        assert same_bits(compiled(x), both(x))


def test_any_number_of_columns_takes_at_most_two_compiles(kernel, fresh_compiler):
    counting, graphs = counting_backend()
    compiled = torch.compile(lambda *args: kernel.op(*args), backend=counting, fullgraph=True, dynamic=True)
    for cols in range(2, 9):
        sample = sample_inputs(kernel, "cpu", (3, cols))
        assert same_bits(compiled(*sample[:3]), kernel.op(*sample[:3]))
    assert 1 <= len(graphs) <= 2


class Norm(torch.nn.Module):
    """A module that calls the op, to be exported."""

    def __init__(self, kernel, weight, bias):
        super().__init__()
        self.kernel, self.weight, self.bias = kernel, torch.nn.Buffer(weight), torch.nn.Buffer(bias)

    def forward(self, x):
        return self.kernel.op(x, self.weight, self.bias)


class NormOfSelected(Norm):
    """Rows picked by a mask: their number is known at run time alone."""

    def forward(self, x, mask):
        return super().forward(x[mask.nonzero().squeeze(-1)])


def test_case_44_export_with_a_number_of_rows_from_nonzero(kernel, device):
    x, weight, bias, _ = sample_inputs(kernel, device, (6, 33))
    mask = torch.tensor([1, 0, 1, 1, 0, 0], device=device)
    program = torch.export.export(NormOfSelected(kernel, weight, bias), (x, mask), strict=False)
    assert any(node.target is kernel.op.default for node in program.graph.nodes)
    for picked in (mask, 1 - mask, torch.ones_like(mask), torch.zeros_like(mask)):
        assert same_bits(program.module()(x, picked), kernel.op(x[picked.nonzero().squeeze(-1)], weight, bias))


def test_export_with_a_dynamic_number_of_rows(kernel):
    x, weight, bias, _ = sample_inputs(kernel, "cpu", (6, 33))
    dynamic = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(Norm(kernel, weight, bias), (x,), dynamic_shapes=dynamic)
    for rows in (2, 5, 128):
        t = sample_inputs(kernel, "cpu", (rows, 33)).input
        assert same_bits(program.module()(t), kernel.op(t, weight, bias))


def test_case_47_padded_strides_reach_the_op(kernel, backend, device, fresh_compiler):
    weight, bias = sample_inputs(kernel, device, (30,))[1:3]
    linear = torch.nn.Linear(16, 33, device=device, dtype=kernel.dtype)
    x = sample_inputs(kernel, device, (4, 16)).input

    def sliced(t):
        hidden = linear(t)[:, 1:31]
        return hidden, kernel.op(hidden, weight, bias), kernel.op(hidden.contiguous(), weight, bias)

    with torch.no_grad():
        hidden, y, y_of_copy = torch.compile(sliced, fullgraph=True, backend=backend)(x)
    assert_matches_float64(kernel, y, hidden, weight, bias)
    assert same_bits(y, y_of_copy)


LOADER = """
import sys, torch
try:
    torch.export.load(sys.argv[1])
except Exception as error:
    print("refused:", error, file=sys.stderr)
else:
    raise SystemExit("loaded before `import fastln`")
import fastln
program, (x, y) = torch.export.load(sys.argv[1]), torch.load(sys.argv[2])
assert torch.equal(program.module()(x), y)
"""


@pytest.mark.slow
@pytest.mark.kernels(items=8, access=8, accumulate="float32")
def test_case_46_an_exported_program_loads_in_a_fresh_process_once_fastln_is_imported(kernel, tmp_path):
    x, weight, bias, _ = sample_inputs(kernel, "cpu", (6, 33))
    torch.export.save(torch.export.export(Norm(kernel, weight, bias), (x,)), tmp_path / "norm.pt2")
    torch.save((x, kernel.op(x, weight, bias)), tmp_path / "values.pt")
    arguments = [sys.executable, "-c", LOADER, tmp_path / "norm.pt2", tmp_path / "values.pt"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # torch says by name what it misses: in the error, or in a log line before a vaguer one.
    assert "refused:" in done.stderr
    assert str(kernel.op.default) in done.stderr


def test_vmap_gives_the_rows_of_the_batched_call(kernel, device):
    x, weight, bias, _ = sample_inputs(kernel, device, (4, 3, 33))
    with torch.no_grad():
        assert same_bits(torch.func.vmap(lambda t: kernel.op(t, weight, bias))(x), kernel.op(x, weight, bias))
