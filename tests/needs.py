"""What to do about a tool or an environment that a test needs and the machine lacks."""

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip the test with a reason; under CI, which `make test` has prepared for all of them, fail it."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {what}; `make test` sets it up")
