"""``fastln.LayerNorm``, and ``fastln.convert``, which makes every ``nn.LayerNorm`` of a model one."""

from __future__ import annotations

import numbers
import operator
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import SymFloat, SymInt, Tensor, jit, nn
from torch.nn.utils.parametrize import is_parametrized

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

    NumPy's numbers as sizes and as ``eps`` become Python's, since ``torch.compile`` takes the others for arrays.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shape: Any = normalized_shape
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        vars(self).update(_python_numbers(self))

    def forward(self, input: Tensor) -> Tensor:
        if jit.is_scripting() or jit.is_tracing():  # TorchScript sees this branch alone, so it needs no fastln
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def _python_numbers(module: nn.Module) -> dict[str, Any]:
    """``normalized_shape`` and ``eps`` with Python's numbers in place of NumPy's, where there are any."""
    plain: dict[str, Any] = {}
    shape: Any = vars(module).get("normalized_shape")
    eps: Any = vars(module).get("eps")
    if isinstance(shape, tuple) and not all(isinstance(size, (int, SymInt)) for size in shape):
        plain["normalized_shape"] = tuple(operator.index(n) if hasattr(n, "__index__") else n for n in shape)
    kind: Any = type(eps)
    if isinstance(eps, numbers.Real) and kind not in (float, int, SymFloat, SymInt):
        plain["eps"] = float(eps)
    return plain


_PATCHED = "a forward was set on the instance"
_OWN_FORWARD = "its class has a forward of its own; if that is F.layer_norm and no more, name the class in `also`"
_UNFIT = "its class cannot be exchanged"


class Skipped(NamedTuple):
    """A module that :func:`convert` left as it was."""

    path: str
    """Where it is in the model, as ``named_modules`` has it; ``""`` for the model itself."""
    kind: str
    """Its class, as in ``timm.layers.norm.LayerNorm``."""
    reason: str
    """Why it was left."""


class _Changed(NamedTuple):
    """A module that was converted. ``before`` and ``after`` are its classes beneath any parametrizations."""

    path: str
    module: nn.Module
    before: type[nn.Module]
    after: type[nn.Module]
    parametrized: type[nn.Module] | None
    known: dict[str, Any]
    plain: dict[str, Any]

    def undo(self) -> bool:
        """Whether the module is what it was again; if something else has changed its class, it is left alone."""
        kind = type(self.module)
        if kind is self.after:
            self.module.__class__ = self.before
        elif _has_class_of_parametrize(self.module) and kind.__bases__[0] is self.after:
            # Parametrizations may have come or gone since, and their properties are on the class that it has now.
            known = self.parametrized
            same = known is not None and dict(vars(known)) == dict(vars(kind))
            self.module.__class__ = known if known and same else _with_base(kind, self.before)
        else:
            return False
        state = vars(self.module)
        state.update({name: value for name, value in self.known.items() if state.get(name) is self.plain[name]})
        return True


class Conversion:
    """What :func:`convert` did, with the way back; as a context manager it goes back by itself.

    Attributes:
        count: How many modules were converted. One that is used in several places counts once.
        skipped: The layer norms that were left as they were, and why.
    """

    def __init__(self, model: nn.Module, also: tuple[type[nn.LayerNorm], ...]) -> None:
        self.skipped: list[Skipped] = []
        self._changed: list[_Changed] = []
        vouched_for: tuple[Any, ...] = (nn.LayerNorm, *also)
        try:
            for path, module in model.named_modules():
                kind: Any = type(module)
                if not isinstance(module, nn.LayerNorm) or isinstance(module, LayerNorm):
                    continue
                if "forward" in vars(module):
                    self.skipped.append(Skipped(path, _name(kind), _PATCHED))
                elif not any(issubclass(kind, known) and kind.forward is known.forward for known in vouched_for):
                    self.skipped.append(Skipped(path, _name(kind), _OWN_FORWARD))
                else:
                    try:
                        self._change(path, module)
                    except Exception as error:  # of __init_subclass__, or of a metaclass
                        self.skipped.append(Skipped(path, _name(kind), f"{_UNFIT}: {error!r}"))
        except BaseException:
            self.undo()
            raise
        self.count = len(self._changed)

    def _change(self, path: str, module: nn.Module) -> None:
        kind = type(module)
        parametrized = _has_class_of_parametrize(module)
        before: Any = kind.__bases__[0] if parametrized else kind
        after = LayerNorm if before is nn.LayerNorm else _converted(before)
        plain = _python_numbers(module)
        known = {name: vars(module)[name] for name in plain}
        module.__class__ = _with_base(kind, after) if parametrized else after
        vars(module).update(plain)
        self._changed.append(_Changed(path, module, before, after, kind if parametrized else None, known, plain))

    def undo(self) -> None:
        """Makes every converted module what it was; what training did to its parameters stays.

        Parametrizations registered or removed meanwhile stay so. A module whose class something else has changed
        meanwhile, as ``fully_shard`` does, is left alone, with a warning. A second call does nothing.
        """
        changed, self._changed = self._changed, []
        left = [one for one in changed if not one.undo()]
        for path, module, _, after, *_ in left:  # only now, as a warning may be made an error
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
            you vouch that it is ``F.layer_norm`` over ``normalized_shape``. ``timm.layers.LayerNorm`` is one. Their
            subclasses that have the same ``forward`` are included.

    Returns:
        A :class:`Conversion`, which says how many were converted and can undo it.

    Raises:
        TypeError: ``model`` is no module, ``also`` is a class itself, or something in it no subclass of
            ``nn.LayerNorm``.

    A subclass with a ``forward`` of its own, a module on which one was set, and one whose class allows no subclass,
    are skipped with a warning. A subclass without a ``forward`` becomes a class that is still a subclass of it, and of
    :class:`LayerNorm` too. Parametrized modules stay parametrized, and their parametrizations can be removed.
    NumPy's numbers in ``normalized_shape`` and ``eps`` become Python's until ``undo()``. A model that has run compiled
    keeps its graphs until ``torch.compiler.reset()``. After an error the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fastln.convert: expected an nn.Module, got {type(model).__qualname__}")
    if isinstance(also, type) or not isinstance(also, Iterable):
        wanted = "expected also to be a sequence of subclasses of nn.LayerNorm, as in also=[timm.layers.LayerNorm]"
        raise TypeError(f"fastln.convert: {wanted}, got {also!r}")
    also = tuple(also)
    for kind in also:
        if not (isinstance(kind, type) and issubclass(kind, nn.LayerNorm)):
            raise TypeError(f"fastln.convert: expected subclasses of nn.LayerNorm in also, got {kind!r}")
    conversion = Conversion(model, also)
    try:
        for name, reason in dict.fromkeys((skipped.kind, skipped.reason) for skipped in conversion.skipped):
            paths = [_place(s.path) for s in conversion.skipped if (s.kind, s.reason) == (name, reason)]
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            warnings.warn(
                f"fastln.convert: skipped {name} at {', '.join(paths[:3])}{more}: {reason}",
                stacklevel=2,
            )
    except BaseException:  # a filter makes warnings errors, and nobody gets the conversion to undo it
        conversion.undo()
        raise
    return conversion


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _place(path: str) -> str:
    return path or "the model itself"


def _has_class_of_parametrize(module: nn.Module) -> bool:
    """Whether its class is the one that parametrizations made for this module: a subclass with their properties."""
    names: Any = module.parametrizations if is_parametrized(module) else ()
    return len(names) > 0 and all(isinstance(vars(type(module)).get(name), property) for name in names)


def _with_base(kind: Any, base: type) -> Any:
    """A class like ``kind``, which parametrizations made, over another base.

    Not a subclass of it: torch finds properties to remove in the module's own class, and the class to return to in its
    first base.
    """
    return type(kind)(kind.__name__, (base,), dict(vars(kind)))


# Weak in both: a class that only this knows, of a module that is gone, goes too.
_known_converted: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _converted(kind: Any) -> Any:
    """A subclass of ``kind`` with our forward. Nobody can import it by name, so it pickles as ``kind``, converted."""
    known = _known_converted.get(kind)
    converted: Any = known() if known is not None else None
    if converted is not None:
        return converted

    def __reduce_ex__(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        as_torch_has_it: Any = super(converted, self).__reduce_ex__
        if type(self) is not converted:  # what torch made of it since
            return tuple(as_torch_has_it(protocol))
        # copyreg's own answer, from protocol 2 on: (__newobj__, (class, *arguments), state, ...).
        _, (_, *arguments), *rest = as_torch_has_it(2)
        return (_new_converted, (kind, *arguments), *rest)

    # A new one is made with the arguments of ``kind``.
    attributes = {"__init__": kind.__init__, "__reduce_ex__": __reduce_ex__}
    attributes |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    converted = type(kind)(kind.__name__, (LayerNorm, kind), attributes)
    _known_converted[kind] = weakref.ref(converted)
    return converted


def _new_converted(kind: Any, *arguments: Any) -> Any:
    converted = _converted(kind)
    return converted.__new__(converted, *arguments)
