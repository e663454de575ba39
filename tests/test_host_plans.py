"""What the launchers work out on the host, for GPUs of every compute capability in the wheel."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CXX = os.environ.get("CXX", "g++")


@pytest.mark.skipif(shutil.which(CXX.split()[0]) is None, reason="it is a C++ program, and there is no compiler")
def test_launches_fit_every_gpu_and_code_is_known_by_its_version(tmp_path):
    # Once 6152 to 7168 columns of 16 bits asked for 112 KB of shared memory on GPUs that have 99 a block.
    program = tmp_path / "host_plans"
    source = TESTS / "host_plans.cpp"
    command = [*CXX.split(), "-std=c++20", "-O1", "-Wall", "-I", TESTS.parent / "src", source, "-o", program]
    subprocess.run(command, check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed[-1].startswith("checked ")
    assert int(printed[-1].split()[1]) > 1_000_000
    assert printed[:-1] == []
