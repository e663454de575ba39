"""``fastln.LayerNorm``, and ``fastln.convert``, which makes every ``nn.LayerNorm`` of a model one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, jit, nn

from fastln._norm import layer_norm


class LayerNorm(nn.LayerNorm):
    r"""``nn.LayerNorm`` on :func:`fastln.layer_norm`: the same arguments, attributes and state dict.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \mathrm{eps}}} \cdot weight + bias

    Args:
        normalized_shape: Sizes of the last dimensions, which are normalized together; an int for one.
        eps: Added to the variance.
        elementwise_affine: Whether there are a weight (ones at first) and a bias (zeros) of ``normalized_shape``.
        bias: Whether there is a bias where there is a weight.
        device: Device of weight and bias.
        dtype: dtype of weight and bias.

    The input is ``[..., *normalized_shape]`` of a floating dtype, which need not be that of the parameters. The
    output has the input's shape and dtype; under ``torch.autocast`` on CUDA it is float32, as that of
    ``nn.LayerNorm`` is. dtypes, limits, errors and streams are those of :func:`fastln.layer_norm`. Nested tensors and
    TorchScript get torch's own layer norm.
    """

    def forward(self, input: Tensor) -> Tensor:
        if jit.is_scripting() or jit.is_tracing():  # TorchScript sees this branch alone, so it needs no fastln
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


_PATCHED = "a forward was set on the instance"
_OWN_FORWARD = "its class has a forward of its own; if that is F.layer_norm and no more, name the class in `also`"


class Skipped(NamedTuple):
    """A module that :func:`convert` left as it was."""

    path: str
    """Where it is in the model, as ``named_modules`` has it; ``""`` for the model itself."""
    kind: str
    """Its class, as in ``timm.layers.norm.LayerNorm``."""
    reason: str
    """Why it was left."""


class Conversion:
    """What :func:`convert` did, with the way back; as a context manager it goes back by itself.

    Attributes:
        count: How many modules were converted. One that is used in several places counts once.
        skipped: The layer norms that were left as they were, and why.
    """

    def __init__(self, model: nn.Module, also: tuple[type[nn.LayerNorm], ...]) -> None:
        self.skipped: list[Skipped] = []
        self._changed: list[tuple[str, nn.Module, type[nn.Module], type[nn.Module]]] = []
        for path, module in model.named_modules():
            before = type(module)
            if not isinstance(module, nn.LayerNorm) or isinstance(module, LayerNorm):
                continue
            if "forward" in vars(module):
                self.skipped.append(Skipped(path, _name(before), _PATCHED))
            elif before.forward is not nn.LayerNorm.forward and before not in also:
                self.skipped.append(Skipped(path, _name(before), _OWN_FORWARD))
            else:
                after = LayerNorm if before is nn.LayerNorm else _converted(before)
                module.__class__ = after
                self._changed.append((path, module, before, after))
        self.count = len(self._changed)

    def undo(self) -> None:
        """Makes every converted module what it was; what training did to its parameters stays.

        A module whose class something else has changed meanwhile, as ``fully_shard`` and parametrizations do, is
        left alone, with a warning. A second call does nothing.
        """
        changed, self._changed = self._changed, []
        for path, module, before, after in changed:
            if type(module) is after:
                module.__class__ = before
            else:
                warnings.warn(
                    f"fastln.convert: cannot undo {_place(path)}: expected {after.__qualname__}, which it was "
                    f"converted to, got {type(module).__qualname__}",
                    stacklevel=2,
                )

    def __enter__(self) -> Conversion:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        left = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"<fastln.convert: {self.count} LayerNorm modules converted{left}>"


def convert(model: nn.Module, also: Sequence[type[nn.LayerNorm]] = ()) -> Conversion:
    """Makes every ``nn.LayerNorm`` in ``model``, itself included, a :class:`LayerNorm`, in place.

    Each module stays the object it is and changes its class alone. So values, dtype, device, eps, training mode,
    hooks, parameters and modules used in several places, optimizers and references from elsewhere all stay as
    they are, and the state dict keeps its keys.

    Args:
        model: Any module.
        also: Subclasses of ``nn.LayerNorm`` whose ``forward`` differs from its parent's in nothing that counts:
            you vouch that it is ``F.layer_norm`` over ``normalized_shape``. ``timm.layers.LayerNorm`` is one.

    Returns:
        A :class:`Conversion`, which says how many were converted and can undo it.

    Raises:
        TypeError: ``model`` is no module, or something in ``also`` no subclass of ``nn.LayerNorm``.

    A subclass with a ``forward`` of its own, or a module on which one was set, is skipped with a warning. A subclass
    without one becomes a class that is still a subclass of it, and of :class:`LayerNorm` too. A model that has run
    compiled keeps its graphs until ``torch.compiler.reset()``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fastln.convert: expected an nn.Module, got {type(model).__qualname__}")
    also = tuple(also)
    for kind in also:
        if not (isinstance(kind, type) and issubclass(kind, nn.LayerNorm)):
            raise TypeError(f"fastln.convert: expected subclasses of nn.LayerNorm in also, got {kind!r}")
    conversion = Conversion(model, also)
    for name, reason in dict.fromkeys((skipped.kind, skipped.reason) for skipped in conversion.skipped):
        paths = [_place(s.path) for s in conversion.skipped if (s.kind, s.reason) == (name, reason)]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        warnings.warn(
            f"fastln.convert: skipped {name} at {', '.join(paths[:3])}{more}: {reason}",
            stacklevel=2,
        )
    return conversion


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _place(path: str) -> str:
    return path or "the model itself"


@functools.cache
def _converted(kind: Any) -> Any:
    """A subclass of ``kind`` with our forward. Nobody can import it by name, so it pickles as ``kind``, converted."""

    def __reduce_ex__(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        # copyreg's own answer, from protocol 2 on: (__newobj__, (class, *arguments), state, ...).
        reduced: Any = super(converted, self).__reduce_ex__(2)
        _, (_, *arguments), *rest = reduced
        return (_new_converted, (kind, *arguments), *rest)

    attributes = {"__reduce_ex__": __reduce_ex__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    converted = type(kind)(kind.__name__, (LayerNorm, kind), attributes)
    return converted


def _new_converted(kind: Any, *arguments: Any) -> Any:
    converted = _converted(kind)
    return converted.__new__(converted, *arguments)
