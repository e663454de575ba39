"""Everything that has to hold on a GPU machine, in one command and without a network:

    python3 bench/gpu_check.py dist/fastln-0.1.0-py3-none-linux_x86_64.whl build/gpu

It installs the wheel into a folder of its own, then runs the tests, compute-sanitizer, the report, the
benchmark and the training runs against that copy. A step that fails does not stop the others. In the output
folder it leaves one log for each step, summary.json and the results: bench.json of the named ops,
layer_norm.json of ``fastln.layer_norm``, backward.json of its backward, training.json. The exit status is 0 if
every step passed.

The Python that runs it must have torch, pytest and pytest-benchmark; with liger-kernel, Liger is measured too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: A plugin for the pytest runs: stop unless fastln comes from the installed wheel.
GUARD = """
import os
from pathlib import Path
import pytest

def pytest_sessionstart(session):
    import fastln
    found, wanted = Path(fastln.__file__).resolve().parent.parent, Path(os.environ["FASTLN_SITE"]).resolve()
    if found != wanted:
        raise pytest.UsageError(f"fastln is imported from {found}, not from the installed wheel in {wanted}")
"""

VERSIONS = """
import sys, torch, fastln
print("python", sys.version.split()[0], "torch", torch.__version__)
print("gpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "none visible to torch")
print("fastln", fastln.__version__, "from", fastln.__file__)
print(fastln.build_info())
if not torch.cuda.is_available():
    sys.exit("This checks what happens on a GPU, and torch sees none.")
"""


@dataclass
class Step:
    """One command of the check."""

    name: str
    command: str  # for bash
    seconds: int  # it is killed after these
    environment: dict[str, str] = field(default_factory=dict)


STEPS = ("tests", "report", "bench", "training", "memcheck", "racecheck")

#: Seconds that a step has between the interruption and the end.
GRACE = 15

#: How much of the end of a step's log to show, where that is much: tables.
LINES = {"report": 90, "bench": 90, "layer_norm": 75, "backward": 90}

#: Files of the benchmark. Each runs as a step of its own, named after it, which leaves its results beside its log.
BENCHES = ("bench/test_forward.py", "bench/test_layer_norm.py", "bench/test_backward.py")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="TEXT")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path, help="folder for logs and results; made if missing")
    add("--steps", default=",".join(STEPS), help="which steps, in which order (default: %(default)s)")
    add("--budget", type=int, default=1500, help="seconds for all steps together (default: %(default)s)")
    add("--tests", default="tests", help="tests to run, below the checkout (default: %(default)s)")
    add("--marks", default="not slow and not large", help="pytest -m for the step tests (default: %(default)s)")
    add("--sanitize", default="sanitizer", help="pytest -m for memcheck and racecheck (default: %(default)s)")
    add("--kernels", default="fastln", help="sanitize kernels with this in their mangled name (default: %(default)s)")
    add("--workers", type=int, default=0, help="run the step tests in so many processes (needs pytest-xdist)")
    add("--bench", default=",".join(BENCHES), help="files the step bench runs (default: %(default)s)")
    add("-k", default="", help="pytest -k for the step tests, and for bench unless --bench-k is given")
    add("--bench-k", help="pytest -k for bench alone, as in --bench-k 'target or dx'")
    options = parser.parse_args()
    if not options.wheel.is_file():
        parser.error(f"no such wheel: {options.wheel}")
    options.steps = [name for name in options.steps.split(",") if name]
    unknown = set(options.steps) - set(STEPS)
    if unknown:
        parser.error(f"unknown step: {', '.join(sorted(unknown))}")
    options.bench = [ROOT / name for name in options.bench.split(",") if name]
    missing = [str(path) for path in options.bench if not path.exists()]
    if missing:
        parser.error(f"no such file of the benchmark: {', '.join(missing)}")
    return options


def plan(options: argparse.Namespace, folder: Path) -> list[Step]:
    """The steps asked for, after the installation that all need."""
    quote = shlex.quote
    python, root = quote(sys.executable), quote(str(ROOT))
    install = (
        f"{python} -m pip install --quiet --no-deps --no-index --no-cache-dir --target site "
        f"{quote(str(options.wheel.resolve()))} && {python} versions.py"
    )
    pytest = (
        f"{python} -m pytest -p gpu_check_guard -p no:cacheprovider -q -rfE --tb=short --import-mode=importlib "
        f"--rootdir={root} -c {root}/pyproject.toml"
    )
    tests = f"{pytest} {root}/{quote(options.tests)}"
    bench_k = options.k if options.bench_k is None else options.bench_k
    chosen, bench_chosen = (f" -k {quote(text)}" if text else "" for text in (options.k, bench_k))
    sanitizer = (
        f"{quote(find_sanitizer())} --error-exitcode=99 --report-api-errors=no --launch-timeout=120 --print-limit=20 "
        f"--kernel-name=kns={quote(options.kernels)}"
    )
    workers = f" -n {options.workers}" if options.workers else ""
    sanitized = f"{tests} -m {quote(options.sanitize)}"
    race_checked = f"{tests} -m {quote(f'({options.sanitize}) and not no_racecheck')}"
    # In a block of the caching allocator, an access past the end of a tensor hits valid memory.
    no_caching = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    steps = [
        Step("tests", f"{tests} -m {quote(options.marks)}{chosen}{workers}", 600),
        Step("report", f"{python} -m fastln", 180),
        Step("training", f"{python} {root}/bench/train_curve.py {quote(str(options.out / 'training.json'))}", 180),
        Step("memcheck", f"{sanitizer} --tool=memcheck {sanitized}", 400, no_caching),
        Step("racecheck", f"{sanitizer} --tool=racecheck {race_checked}", 400, no_caching),
    ]
    named = {step.name: [step] for step in steps}
    named["bench"] = []
    for path in options.bench:
        name = bench_name(path)
        results = quote(str(options.out / f"{name}.json"))
        command = (
            f"{pytest} {quote(str(path))} --benchmark-json={results} --benchmark-quiet{bench_chosen}; status=$?; "
            f"{python} {root}/bench/table.py {results} || status=1; exit $status"
        )
        named["bench"].append(Step(name, command, 500))
    return [Step("install", install, 120), *(step for name in options.steps for step in named[name])]


def bench_name(path: Path) -> str:
    """Name of the step that runs this part of the benchmark, and of its results: ``bench`` for the named ops."""
    return "bench" if path.stem == "test_forward" else path.stem.removeprefix("test_")


def find_sanitizer() -> str:
    """compute-sanitizer on the PATH or where the toolkit puts it."""
    at_home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or str(at_home)


def run(step: Step, folder: Path, out: Path, seconds: float) -> dict:
    """Run one step with its output in a log; when the time is up, interrupt it, so that a benchmark writes down what it
    has measured, and then kill it with all its children."""
    site = folder / "site"
    environment = os.environ | {
        "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",  # so that pytest does not shorten the names of failed tests
        "PYTHONDONTWRITEBYTECODE": "1",
        "FASTLN_SITE": str(site),
        **step.environment,
    }
    log = out / f"{step.name}.log"
    start = time.monotonic()
    with log.open("w") as file:
        print("$", step.command, file=file, flush=True)
        # In another folder than the checkout: its fastln/ must not be what is imported.
        process = subprocess.Popen(
            ["bash", "-c", step.command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = "timeout"
            with contextlib.suppress(ProcessLookupError):  # once all of the group have ended
                os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {"step": step.name, "status": status, "seconds": round(time.monotonic() - start, 1)}


def show(result: dict, log: Path, lines: int) -> None:
    """The end of a step's log, and before it the tests that failed."""
    text = log.read_text(errors="replace").splitlines()
    print(f"\n===== {result['step']}: status {result['status']}, {result['seconds']} s, {log}", flush=True)
    failed = [line for line in text if re.match(r"(FAILED|ERROR) ", line)]
    for line in failed[:40]:
        print(line[:200])
    if len(failed) > 40:
        print(f"... and {len(failed) - 40} more")
    print(*text[-lines:], sep="\n", flush=True)


def require_kernels(site: Path, text: str) -> None:
    """A filter that matches no kernel would make compute-sanitizer pass without having checked any."""
    library = site / "fastln" / "libfastln.so"
    if not re.search(rb"_Z\w*" + re.escape(text.encode()) + rb"\w*", library.read_bytes()):
        sys.exit(f"{library} has no symbol with {text!r} in it, so --kernels={text} would check nothing")


def main() -> int:
    options = parse()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    deadline = time.monotonic() + options.budget
    with tempfile.TemporaryDirectory(prefix="fastln-check-") as name:
        folder = Path(name)
        (folder / "site").mkdir()
        (folder / "site" / "gpu_check_guard.py").write_text(GUARD)
        (folder / "versions.py").write_text(VERSIONS)
        for step in plan(options, folder):
            seconds = min(step.seconds, deadline - time.monotonic())
            if seconds < 5:
                results.append({"step": step.name, "status": "no time left", "seconds": 0.0})
                continue
            print(f"\n>>> {step.name} (at most {seconds:.0f} s)", flush=True)
            results.append(run(step, folder, options.out, seconds))
            show(results[-1], options.out / f"{step.name}.log", LINES.get(step.name, 15))
            if step.name == "install":
                if not (folder / "site" / "fastln").exists():
                    break  # there is nothing to check
                require_kernels(folder / "site", options.kernels)
    (options.out / "summary.json").write_text(json.dumps(results, indent=2) + "\n")
    print("\n===== summary")
    for result in results:
        print(
            f"{result['step']:<10} {'ok' if result['status'] == 0 else result['status']!s:<13} {result['seconds']:>7} s"
        )
    return 0 if all(result["status"] == 0 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
