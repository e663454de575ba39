"""``fastln.override``: our kernels behind aten's own layer norm, for models that nobody wants to touch."""

from __future__ import annotations

import collections
import ctypes
import threading
import time
import warnings

import torch

from fastln._library import build_info, library

# By way of PyDLL it keeps the GIL, so that no other thread starts a layer norm from Python meanwhile. (Threads of
# autograd start a backward without it.)
_fastln_override = ctypes.PyDLL(library._name).fastln_override
_fastln_override.restype = ctypes.c_char_p

#: What our kernels stand in for; another torch may mean something else by these names.
_SCHEMAS = (
    "aten::native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    "aten::native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, "
    "Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
)

_lock = threading.Lock()
_holders = 0  # overrides in force
_said = False  # whether torch has given its one warning

# A thread may still be inside a kernel when another one removes it, and torch reads the kernel's object once
# more on the way out. So those in force are held, and removed ones for a minute more: (time of removal, kernels).
_in_force: list[object] = []
_removed: collections.deque[tuple[float, list[object]]] = collections.deque()


class Override:
    """One holder of the override, which is in force until the last holder has let go of it."""

    def __init__(self) -> None:
        self._holds = False
        with _lock:
            _hold()
        self._holds = True

    def undo(self) -> None:
        """Lets go. A second call does nothing."""
        with _lock:
            if self._holds:
                self._holds = False
                _release()

    def __enter__(self) -> Override:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<fastln.override: {'on' if self._holds else 'undone'}>"


def override() -> Override:
    """Puts our kernels behind ``aten::native_layer_norm`` and its backward on CUDA, for the whole process.

    ``F.layer_norm``, ``nn.LayerNorm`` and whatever else ends there then run them, under torch's own autograd (double
    backward, forward mode), autocast and functorch. CPU tensors, nested tensors, and graphs in which
    ``torch.compile`` has made layer norm code of its own are not concerned. All that aten's kernels take is taken,
    all that they refuse is refused in their words, and outputs have the same shapes, dtypes and layouts; values
    are those of :func:`fastln.layer_norm`.

    Returns:
        An :class:`Override`. Its ``undo()`` ends it, and so does leaving it as a context manager; if it is dropped,
        the override stays. Overrides nest and may come from several threads: aten's kernels are back
        when the last one is undone.

    Raises:
        RuntimeError: torch has no CUDA, or other ops under these names, or a GPU in use is one that this build has no
            code for. Nothing has changed then.

    It is a switch of the process, not of the thread: other threads' layer norms run our kernels too while any
    override is on. **No thread may be inside a layer norm on CUDA, or the backward of one, when the first override
    begins and when the last one ends**: torch changes its table of kernels without a lock, and a call that reads it in
    that instant may crash the process. At the start of a program there is none, nor between two steps of a program that
    trains in one thread: ``backward()`` returns when all of it is done.
    """
    return Override()


def overriding() -> bool:
    """Whether an override is in force."""
    return _holders > 0


def _hold() -> None:
    global _holders, _in_force
    if _holders == 0:
        _check()
        _take_the_warning()
        _switch(True)
        _in_force = [torch.library.get_kernel(schema.partition("(")[0], "CUDA") for schema in _SCHEMAS]
    _holders += 1


def _release() -> None:
    global _holders
    if _holders == 1:
        _switch(False)
        now = time.monotonic()
        while _removed and _removed[0][0] < now - 60:
            _removed.popleft()
        _removed.append((now, _in_force))
    _holders -= 1


def _switch(on: bool) -> None:
    error = _fastln_override(on)
    if error is not None:
        raise RuntimeError(f"fastln.override: {error.decode()}")


def _check() -> None:
    if torch.version.cuda is None:
        raise RuntimeError(f"fastln.override: expected a torch built for CUDA, got {torch.__version__}")
    for expected in _SCHEMAS:
        name = expected.partition("(")[0].removeprefix("aten::")
        op = getattr(torch.ops.aten, name, None)
        got = "none" if op is None else str(op.default._schema)
        if got != expected:
            raise RuntimeError(f"fastln.override: expected a torch with {expected}, got {got} in {torch.__version__}")
    if torch.cuda.is_initialized():  # otherwise the first call checks its device
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            if not library.fastln_supports_arch(major, minor):
                raise RuntimeError(
                    "fastln.override: expected GPUs of a compute capability this build was compiled for "
                    f"({build_info()['arch_list']}), got {major}.{minor} as cuda:{index}"
                )


def _take_the_warning() -> None:
    """Lets torch give its one warning, that a kernel replaces another, where nobody hears it."""
    global _said
    if not _said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.library.Library("fastln", "IMPL").impl("_replaced", lambda: None, "CPU")
        _said = True
