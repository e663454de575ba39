"""What to do about a tool or an environment that a test needs and the machine lacks."""

import functools
import os
import tempfile
from typing import NoReturn

import pytest
from fresh import process


def missing(what: str) -> NoReturn:
    """Skip the test with a reason; under CI, which `make test` has prepared for all of them, fail it."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {what}; `make test` sets it up")


PACKAGE = """
    import torch
    model, x = torch.nn.Linear(8, 8).to(DEVICE), torch.ones(2, 8, device=DEVICE)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=FOLDER + "/model.pt2")
"""


@functools.cache
def loads_packages(device_type: str) -> bool:
    """Whether a process survives loading torch's own AOTInductor package, with nothing of fastln in it."""
    with tempfile.TemporaryDirectory() as folder:
        given = f"DEVICE, FOLDER = {device_type!r}, {folder!r}"
        made = process(given, PACKAGE)
        assert made.returncode == 0, made.stderr
        loaded = process(given, "import torch; torch._inductor.aoti_load_package(FOLDER + '/model.pt2')")
    return loaded.returncode == 0


def require_loadable_packages(device) -> None:
    """Skip where torch itself crashes. (The CUDA build of 2.11 does on Ubuntu 24.04, in std::regex of the package's
    compiler, which is newer than torch's.)"""
    if not loads_packages(device.type):
        pytest.skip("this torch crashes when it loads any AOTInductor package")
