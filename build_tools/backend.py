"""setuptools' build backend, which also asks for torch and, where the machine has none, a CUDA compiler.

Both are asked for here, in one go, rather than torch in pyproject.toml: torch brings parts of the
package cuda-toolkit, and pip then takes our wish for its other parts as fulfilled.
"""

import preflight
from setuptools.build_meta import *  # noqa: F403

TORCH = "torch>=2.10"


def get_requires_for_build_wheel(config_settings=None):
    """Packages that a build environment needs beside those of build-system.requires."""
    preflight.arch_list()  # refused now rather than after a long download
    preflight.check_host_compiler()
    return [TORCH, *preflight.packages_to_install()]


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings=None):
    """An sdist compiles nothing, but setup.py imports torch."""
    return [TORCH]
