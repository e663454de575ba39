"""Runs Python in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: A Python with another, CPU-only torch, which `make test` sets up.
CPU_PYTHON = ROOT / ".venv-cpu" / "bin" / "python"


def process(*parts, interpreter=sys.executable, options=(), **environment):
    """A fresh Python that is done. Not from the checkout, whose fastln/ would shadow the installed package."""
    code = "\n".join(map(textwrap.dedent, parts))
    command = [interpreter, *options, "-c", code]
    return subprocess.run(command, cwd="/", env=os.environ | environment, capture_output=True, text=True)


def python(*parts, **how):
    """What it prints; it must not fail."""
    done = process(*parts, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout
