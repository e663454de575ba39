"""Fixtures and marks that all tests share, and the guard that it is the installed fastln they test."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
CHECKOUT_PACKAGE = TESTS.parent / "fastln"

# `import reference` works in every import mode, importlib's too, which adds no folder by itself.
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

MARKS = {
    "sanitizer": "small enough to run under compute-sanitizer",
    "no_racecheck": "not under compute-sanitizer's racecheck, which does not follow bytes that an mbarrier counts",
    "large": "needs about 20 GB of free GPU memory",
    "slow": "takes several seconds, because a compiler runs",
    "kernels": "kernels(accumulate=..., element=...) keeps `kernel` to those with these facts (a tuple: any of)",
}


def _require_installed_package():
    """Stop at once where `import fastln` would find the checkout's folder of Python files, unbuilt."""
    spec = importlib.util.find_spec("fastln")
    if spec is None or spec.origin is None:
        raise pytest.UsageError("fastln is not installed: run `make test`, or install the wheel first")
    package = Path(spec.origin).resolve().parent
    if package == CHECKOUT_PACKAGE and not list(package.glob("libfastln*.so")):
        raise pytest.UsageError(
            f"`import fastln` finds the unbuilt folder {package} rather than an installed package: "
            "run `pytest` (not `python -m pytest`) from the checkout, after installing the wheel"
        )


_require_installed_package()

import fastln  # noqa: E402  (the guard above must come first)

HAS_CUDA = torch.cuda.is_available()
HAS_CXX = shutil.which(os.environ.get("CXX", "g++")) is not None


def pytest_configure(config):
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def _has(kernel, name, wanted):
    """Whether the kernel's fact is the one wanted, or one of those wanted."""
    return getattr(kernel, name) in (wanted if isinstance(wanted, tuple) else (wanted,))


def _kernels_and_backends(kernels):
    """Every kernel under aot_eager, and under inductor, which takes seconds, one of each element type."""
    for k in kernels:
        yield pytest.param(k, "aot_eager", id=f"{k.name}-aot_eager")
    marks = [pytest.mark.slow, pytest.mark.skipif(not HAS_CXX, reason="inductor needs a C++ compiler")]
    for k in {k.element: k for k in kernels}.values():
        yield pytest.param(k, "inductor", id=f"{k.name}-inductor", marks=marks)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    # Around the tests' own parameters, so that an id reads [kernel-...-device].
    facts = [item for mark in metafunc.definition.iter_markers("kernels") for item in mark.kwargs.items()]
    kernels = [k for k in fastln.KERNELS if all(_has(k, *fact) for fact in facts)]
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize(("kernel", "backend"), list(_kernels_and_backends(kernels)))
    elif "kernel" in metafunc.fixturenames:
        metafunc.parametrize("kernel", [pytest.param(k, id=k.name) for k in kernels])
    result = yield
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", "cuda"], indirect=True)
    return result


def pytest_collection_modifyitems(config, items):
    """Without a GPU keep one CUDA item of each test function, which says that it is skipped, and drop
    the thousands of others, which would say the same."""
    if HAS_CUDA:
        return
    kept, dropped, seen = [], [], set()
    for item in items:
        on_cuda = getattr(item, "callspec", None) is not None and item.callspec.params.get("device") == "cuda"
        (dropped if on_cuda and item.function in seen else kept).append(item)
        if on_cuda:
            seen.add(item.function)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture
def device(request):
    """Each device in turn; CUDA is skipped where there is no GPU."""
    if request.param == "cuda" and not HAS_CUDA:
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture
def cuda():
    """The current CUDA device, for what has no meaning on a CPU."""
    if not HAS_CUDA:
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.fixture
def second_cuda():
    """A CUDA device that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return torch.device("cuda", 1)


@pytest.fixture
def inductor():
    """For a test that always compiles with inductor."""
    if not HAS_CXX:
        pytest.skip("inductor needs a C++ compiler")


@pytest.fixture(scope="session", autouse=True)
def compiled_code_has_our_op():
    """Tests of compiled code are about our op; test_compile_mode.py knows of the other mode, and of the default."""
    before = fastln.set_compile_mode("op", "op")
    yield
    fastln.set_compile_mode(*before)


@pytest.fixture
def fresh_compiler():
    """No graph of another test in torch.compile's caches."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
