"""CUDA LayerNorm kernels in an ahead-of-time compiled wheel.

``fastln.layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5)`` is ``F.layer_norm`` at the
speed of memory; ``torch.ops.fastln.layer_norm`` is the op beneath it.

``torch.ops.fastln.layer_norm_<name>(input, weight=None, bias=None, eps=1e-5)`` for each ``name`` in
``KERNELS`` is one kernel of the ladder that leads there, over the last dimension.
"""

from fastln import _named, _vmap, distributed  # noqa: F401  (what they register for torch to find)
from fastln._compile import CompileMode, compile_mode, set_compile_mode
from fastln._library import KERNELS, Kernel, build_info
from fastln._norm import Plan, layer_norm, plan
from fastln.modules import Conversion, LayerNorm, Skipped, convert
from fastln.override import Override, override, overriding

__all__ = [
    "KERNELS",
    "CompileMode",
    "Conversion",
    "Kernel",
    "LayerNorm",
    "Override",
    "Plan",
    "Skipped",
    "__version__",
    "build_info",
    "compile_mode",
    "convert",
    "layer_norm",
    "override",
    "overriding",
    "plan",
    "set_compile_mode",
]

__version__: str = build_info()["version"]
