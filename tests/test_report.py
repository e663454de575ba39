"""`python -m fastln`: what it prints, what it writes, what it refuses, and that it tells wrong from right."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fastln
from fastln import _timing, report

KERNELS = {f"layer_norm_{kernel.name}": kernel for kernel in fastln.KERNELS}


def run_module(folder, *options):
    """Run in another folder, so that what is imported is the installed package."""
    command = [sys.executable, "-m", "fastln", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run on the CPU over two tiny shapes: the finished process and its JSON document."""
    folder = tmp_path_factory.mktemp("report")
    process = run_module(folder, "--device", "cpu", "--shapes", "5x100,2x1024", "--json", "report.json")
    assert process.returncode == 0, process.stderr
    return process, json.loads((folder / "report.json").read_text())


def named(records, **facts):
    return {r["name"]: r for r in records if all(r[key] == value for key, value in facts.items())}


@pytest.mark.parametrize("shape", [[5, 100], [2, 1024]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_kernel_stands_beside_torch_at_every_shape(finished, shape, dtype):
    records = named(finished[1]["results"], shape=shape, dtype=dtype)
    expected = [name for name, kernel in KERNELS.items() if kernel.element == dtype]
    assert list(records) == ["F.layer_norm", "naive", *expected]
    for name in expected:
        assert records[name]["verdict"] == "right"
        assert records[name]["accumulate"] == KERNELS[name].accumulate


def test_figures_of_a_record_agree_with_each_other(finished):
    for record in finished[1]["results"]:
        rows, cols = record["shape"]
        size = {"float32": 4, "float16": 2}[record["dtype"]]
        torch_record = named(finished[1]["results"], shape=record["shape"], dtype=record["dtype"])["F.layer_norm"]
        assert record["bytes"] == size * (2 * rows * cols + 2 * cols)
        assert record["seconds"] > 0
        assert record["bytes_per_second"] == pytest.approx(record["bytes"] / record["seconds"])
        assert record["speedup"] == pytest.approx(torch_record["seconds"] / record["seconds"])


def test_only_kernels_that_accumulate_in_float16_overflow(finished):
    records = named(finished[1]["overflow"])
    assert list(records) == ["F.layer_norm", *(n for n, k in KERNELS.items() if k.element == "float16")]
    for name, record in records.items():
        breaks = name in KERNELS and KERNELS[name].accumulate == "float16"
        assert record["smallest_sum_of_squares"] > 65504
        assert record["verdict"] == ("overflows" if breaks else "right")
        assert (record["equal_to_bias"] == 1) == breaks


def test_text_names_every_op_version_and_arch(finished):
    process, document = finished
    for name in ["F.layer_norm", "naive", *KERNELS]:
        assert name in process.stdout
    for fact in (fastln.__version__, torch.__version__, *fastln.build_info()["archs"]):
        assert fact in process.stdout
    assert document["versions"]["build"] == fastln.build_info()
    assert "wall time" in process.stdout and "wall time" in document["timing"]


def test_text_fits_100_columns(finished):
    assert max(len(line) for line in finished[0].stdout.splitlines()) <= 100


def test_progress_goes_to_stderr_alone(finished):
    process, _ = finished
    for group in ("5x100 float32", "5x100 float16", "2x1024 float32", "2x1024 float16", "overflow table"):
        assert process.stderr.count(group) == 1
    assert "\r" not in process.stdout and "\033" not in process.stdout + process.stderr
    assert not any(line.startswith("[") for line in process.stdout.splitlines())


def printed_header(capsys, *arguments):
    options = report.parse(arguments)
    report.print_header({"versions": report.versions(), "device": report.device_facts(options.device)}, options)
    return capsys.readouterr().out


def test_default_shapes_on_a_cpu_are_the_six_with_fewer_rows_and_it_says_so(capsys):
    shapes = report.parse(["--device", "cpu"]).shapes
    assert shapes == [(rows // 32, cols) for rows, cols in report.SHAPES]
    said = "On a CPU the shapes have 1/32 of their usual rows."
    assert said in printed_header(capsys, "--device", "cpu")
    assert said not in printed_header(capsys, "--device", "cpu", "--shapes", "4096x512")


def test_dtype_option_leaves_the_other_dtype_out(tmp_path):
    process = run_module(tmp_path, "--device", "cpu", "--shapes", "2x8", "--dtype", "float32", "--json", "out.json")
    assert process.returncode == 0, process.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert {r["dtype"] for r in document["results"]} == {"float32"}
    assert document["overflow"] == [] and "Overflow" not in process.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "4096"], "expected ROWSxCOLS"),
        (["--shapes", "4x-1"], "expected ROWSxCOLS"),
        (["--shapes", "0x8"], "numbers from 1 on"),
        (["--shapes", ""], "expected ROWSxCOLS"),
        (["--device", "tpu"], "expected cpu, cuda or cuda:INDEX, got 'tpu'"),
        (["--device", "cuda:x"], "expected cpu, cuda or cuda:INDEX, got 'cuda:x'"),
        (["--device", "cuda:99"], "got 'cuda:99'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--json", "no/such/folder/file"], "expected a file in a folder that exists"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, list) else "",
)
def test_rejects_bad_option_with_one_message(options, message, capsys):
    with pytest.raises(SystemExit) as exit_status:
        report.parse(options)
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err


def stand_in(op, accumulate="float32"):
    """A kernel that is not in the library."""
    return SimpleNamespace(name="planted", dtype=torch.float16, accumulate=accumulate, op=op)


def shifted(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias) + 0.1


def not_a_number(x, weight, bias):
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)
    y[-1, -1] = float("nan")
    return y


@pytest.mark.parametrize("op", [shifted, not_a_number])
def test_wrong_values_give_exit_status_1_and_name_the_kernel(op, tmp_path, capsys):
    options = ["--device", "cpu", "--shapes", "3x64", "--dtype", "float16", "--json", str(tmp_path / "out.json")]
    assert report.main(options, kernels=[stand_in(op)]) == 1
    captured = capsys.readouterr()
    assert "WRONG" in captured.out and "layer_norm_planted at 3x64" in captured.err
    document = json.loads((tmp_path / "out.json").read_text())
    assert "layer_norm_planted" in document["wrong"]


def test_a_float16_sum_that_does_not_overflow_is_wrong_in_the_overflow_table(capsys):
    def honest(x, weight, bias):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)

    options = ["--device", "cpu", "--shapes", "3x64", "--dtype", "float16"]
    assert report.main(options, kernels=[stand_in(honest, accumulate="float16")]) == 1
    assert "layer_norm_planted at 128x512" in capsys.readouterr().err


def test_refusal_of_an_op_stops_the_report_with_its_message(capsys):
    def refuse(x, weight, bias):
        raise RuntimeError("fastln::layer_norm_planted: expected an arch of the wheel, got 7.5")

    assert report.main(["--device", "cpu", "--shapes", "3x64"], kernels=[stand_in(refuse)]) == 1
    assert "expected an arch of the wheel, got 7.5" in capsys.readouterr().err


def test_report_on_a_gpu_times_the_device_and_says_so(cuda, tmp_path):
    process = run_module(tmp_path, "--device", "cuda", "--shapes", "64x512", "--json", "out.json")
    assert process.returncode == 0, process.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["device"]["name"] in process.stdout
    assert "CUDA graph" in process.stdout and "CUDA graph" in document["timing"]


def test_inputs_on_a_gpu_are_distinct_aligned_and_overflow_l2(cuda):
    inputs = _timing.random_inputs(1000, 1001, torch.float16, torch.device("cuda", torch.cuda.current_device()))
    l2_bytes = torch.cuda.get_device_properties(cuda).L2_cache_size
    assert sum(x.nbytes for x in inputs) >= 4 * l2_bytes
    assert len({x.data_ptr() for x in inputs}) == len(inputs)
    assert all(x.data_ptr() % 512 == 0 and x.is_contiguous() for x in inputs)
    assert not torch.equal(inputs[0], inputs[1])


def test_device_time_of_two_copies_is_twice_that_of_one(cuda):
    inputs = _timing.random_inputs(4096, 4096, torch.float16, torch.device("cuda", torch.cuda.current_device()))

    def copy(x):
        return torch.empty_like(x).copy_(x)

    rotation = [(x,) for x in inputs]
    once = _timing.time_call(copy, rotation)
    twice = _timing.time_call(lambda x: (copy(x), copy(x)), rotation)
    assert 1.3 < twice / once < 2.2  # the second copy may find some of x in L2
