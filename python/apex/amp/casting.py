# SPDX-License-Identifier: BSD-3-Clause
"""The casts of level O1: ``torch.autocast``, and wrappers of the functions that it does not cast.

Note [Autocast is the switch]
Level O1 enables ``torch.autocast`` for the thread that called ``initialize``. It replaces functions
that autocast does not cast as Apex does (most of them on the CPU, few on CUDA), and those that a
script has registered. A wrapper checks whether autocast is on for the device of a tensor. So
``disable_casts``, ``torch.autocast(..., enabled=False)``, activation checkpointing (whose
recomputation restores the autocast state of the forward) and libraries that check
``torch.is_autocast_enabled`` all agree. Autocast's weight cache is off, because a copy made under
``no_grad``, or before a step, would be used in training.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch

from .._internal import not_served
from .._internal.dtypes import is_low_precision
from .._internal.tree import find_tensors, map_tensors
from ._amp_state import _amp_state
from .lists import defaults, functional_overrides, tensor_overrides, torch_overrides

Function = Callable[..., Any]
_MISSING = object()
#: Arguments without tensors.
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)


class Kind(Enum):
    """What a wrapper does with the floating-point arguments of a function."""

    LOW = "cast them to autocast's dtype, unless all are float64"
    FLOAT32 = "cast low-precision ones to float32"
    PROMOTE = "cast them to the widest dtype among them"
    BANNED = "refuse low-precision ones, or cast them to float32"
    AS_IS = "leave them"


class PatchSet:
    """Attributes replaced on modules and classes. :meth:`restore` restores all of them."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, namespace: Any, name: str, wrap: Callable[[Function], Function]) -> None:
        """Set ``namespace.name`` to ``wrap(namespace.name)``. Static methods stay static."""
        static = inspect.getattr_static(namespace, name) if isinstance(namespace, type) else None
        if isinstance(static, (staticmethod, classmethod)):
            new: Any = type(static)(wrap(static.__func__))
        else:
            new = wrap(getattr(namespace, name))
        own = vars(namespace).get(name, _MISSING)
        setattr(namespace, name, new)
        self._replaced.append((namespace, name, own))

    def restore(self) -> None:
        """Undo all replacements in reverse order. Further calls do nothing."""
        for namespace, name, own in reversed(self._replaced):
            if own is _MISSING:
                delattr(namespace, name)
            else:
                setattr(namespace, name, own)
        self._replaced.clear()


def _floating(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif not isinstance(value, _PLAIN):
            found += find_tensors(value)
    return [tensor for tensor in found if tensor.is_floating_point()]


def _map(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return cast(value)
    return value if isinstance(value, _PLAIN) else map_tensors(value, cast)


class AmpHandle:
    """Casting at level O1, active from construction until :meth:`_deactivate`.

    The wrappers apply to the whole process. The switch applies to the thread that created the
    handle, as with ``torch.autocast``.

    Args:
        dtype: the low-precision dtype, float16 or bfloat16.
        device_types: device types whose tensors are cast; None: CUDA if available, else CPU.
        verbose: print every cast of a wrapper.
        allow_banned: let ``binary_cross_entropy`` take low-precision inputs, in float32.
        registered: functions registered by the user: module, name, and what to do.
    """

    #: Apex keeps cast parameters for one iteration. Here every use casts.
    has_cache = False

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        device_types: Collection[str] | None = None,
        verbose: bool = False,
        allow_banned: bool = False,
        registered: Iterable[tuple[Any, str, Kind]] = (),
    ) -> None:
        if device_types is None:
            device_types = ("cuda",) if torch.cuda.is_available() else ("cpu",)
        self.device_types = frozenset(device_types)
        self.verbose = verbose
        self.allow_banned = allow_banned
        self.registered = list(registered)
        self._patches = PatchSet()
        self._active = True
        self._before = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in self.device_types
        }
        self._cache_before = torch.is_autocast_cache_enabled()
        try:
            self._install()
        except Exception:
            self._patches.restore()
            raise
        for kind in self.device_types:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)
        torch.set_autocast_cache_enabled(False)

    def _install(self) -> None:
        """Replace what the user has registered, and what the lists name. Registrations override
        the lists. torch's functions then run with casts off inside, because autocast would apply
        its own lists; so do functions that a script has moved in the lists."""
        namespaces = [overrides.MODULE for overrides, _ in _DEFAULTS]
        for module, name, kind in self.registered:
            self._replace(module, name, kind, any(module is known for known in namespaces))
        registered = {(id(module), name) for module, name, _ in self.registered}
        for overrides, default in _DEFAULTS:
            present = _kinds(overrides)
            for name in {**default, **present}:
                kind = present.get(name, Kind.AS_IS)
                changed = kind != default.get(name)
                if (id(overrides.MODULE), name) in registered:
                    continue
                if changed or name not in defaults.DONE_BY_TORCH:
                    apart = changed or kind in (Kind.PROMOTE, Kind.BANNED)
                    self._replace(overrides.MODULE, name, kind, apart)
        for name in defaults.RECURRENT:
            self._patches.replace(torch._VF, name, self._wrap_recurrent)

    def _replace(self, module: Any, name: str, kind: Kind, apart: bool) -> None:
        self._patches.replace(module, name, functools.partial(self.wrap, kind=kind, apart=apart))

    def wrap(self, original: Function, kind: Kind, apart: bool) -> Function:
        """`original` with cast arguments; with `apart`, it runs with casts off inside."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.any_casting() or kwargs.get("out") is not None:
                return original(*args, **kwargs)
            cast = self._cast_for(kind, original, _floating((*args, *kwargs.values())))
            if cast is not None:
                args = tuple([_map(arg, cast) for arg in args])
                kwargs = {key: _map(arg, cast) for key, arg in kwargs.items()}
            if not apart:
                return original(*args, **kwargs)
            with self.casts_disabled():
                return original(*args, **kwargs)

        return wrapper

    def _wrap_recurrent(self, original: Function) -> Function:
        """Autocast has a float16 cast for cuDNN's recurrent networks that also packs the weights in
        cuDNN's layout, so float16 is left to it. It must not see bfloat16."""
        low = self.wrap(original, Kind.LOW, apart=True)
        cell = original.__name__.endswith("_cell")

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            packs = not cell and args[0].is_cuda
            if packs and torch.get_autocast_dtype("cuda") == torch.float16:
                return original(*args, **kwargs)
            return low(*args, **kwargs)

        return wrapper

    def _cast_for(
        self, kind: Kind, function: Function, tensors: Sequence[torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function that casts one argument, or None if none needs a cast."""
        low = any(map(is_low_precision, tensors))
        target: torch.dtype | None = torch.float32
        if kind is Kind.AS_IS:
            return None
        if kind is Kind.LOW:
            target = None
            if all(tensor.dtype is torch.float64 for tensor in tensors):
                return None
        elif kind is Kind.PROMOTE:
            dtypes = {tensor.dtype for tensor in tensors}
            if len(dtypes) < 2:
                return None
            target = functools.reduce(torch.promote_types, dtypes)
        elif not low:
            return None
        elif kind is Kind.BANNED and not self.allow_banned:
            remedy = dict(functional_overrides.BANNED_FUNCS).get(function.__name__, "")
            raise NotImplementedError(
                f"{function.__name__} is not safe on float16 or bfloat16 under amp O1: {remedy}."
            )

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or not self.is_casting(tensor):
                return tensor
            dtype = torch.get_autocast_dtype(tensor.device.type) if target is None else target
            if tensor.dtype is dtype or (kind is Kind.FLOAT32 and not is_low_precision(tensor)):
                return tensor
            if self.verbose:
                print(f"{tensor.dtype} -> {dtype} ({getattr(function, '__name__', function)!s})")
            return tensor.to(dtype)

        return cast

    def is_active(self) -> bool:
        """Whether casts happen in this thread now (False inside ``disable_casts``)."""
        return self._active and self.any_casting()

    def any_casting(self) -> bool:
        """Whether tensors of any of the handle's device types are cast in this thread."""
        for kind in self.device_types:
            if torch.is_autocast_enabled(kind):
                return True
        return False

    def is_casting(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is on a device whose tensors are cast in this thread."""
        kind = tensor.device.type
        return kind in self.device_types and torch.is_autocast_enabled(kind)

    @contextlib.contextmanager
    def casts_disabled(self, disabled: bool = True) -> Iterator[None]:
        """Context in which this thread casts nothing (or casts, if not `disabled`)."""
        before = [(kind, torch.is_autocast_enabled(kind)) for kind in self.device_types]
        for kind, _ in before:
            torch.set_autocast_enabled(kind, not disabled)
        try:
            yield
        finally:
            for kind, enabled in before:
                torch.set_autocast_enabled(kind, enabled)

    def casts_enabled(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this thread casts, if the handle is still active."""
        return self.casts_disabled(False) if self._active else contextlib.nullcontext()

    @property
    def cache(self) -> dict[Any, torch.Tensor]:
        """Always empty."""
        return {}

    def remove_cache(self, param: torch.Tensor) -> None:
        """Does nothing."""

    def _clear_cache(self) -> None:
        """Does nothing; scripts with their own ``scale_loss`` call it."""

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Raises RuntimeError with advice. Part of the interface before ``amp.initialize``."""
        not_served.refuse("amp.init().wrap_optimizer", RuntimeError)

    def scale_loss(self, loss: Any, optimizer: Any) -> Any:
        """Raises RuntimeError with advice. Part of the interface before ``amp.initialize``."""
        not_served.refuse("amp.init().scale_loss", RuntimeError)

    def _deactivate(self) -> None:
        """Restore every patched function and the autocast state. Further calls do nothing."""
        if not self._active:
            return
        self._active = False
        self._patches.restore()
        for kind, (enabled, dtype) in self._before.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cache_before)


def _kinds(overrides: Any) -> dict[str, Kind]:
    """What the lists of one namespace say. The first list that names a function applies."""
    kinds: dict[str, Kind] = {}
    for names, kind in (
        (overrides.FP16_FUNCS, Kind.LOW),
        (overrides.FP32_FUNCS, Kind.FLOAT32),
        (overrides.CASTS, Kind.PROMOTE),
        (overrides.SEQUENCE_CASTS, Kind.PROMOTE),
        ([name for name, _ in overrides.BANNED_FUNCS], Kind.BANNED),
    ):
        for name in names:
            if hasattr(overrides.MODULE, name):
                kinds.setdefault(name, kind)
    return kinds


#: The namespaces, and their lists before a script changes them.
_DEFAULTS = [
    (overrides, _kinds(overrides))
    for overrides in (torch_overrides, functional_overrides, tensor_overrides)
]


class NoOpHandle:
    """The handle of ``amp.init(enabled=False)``: casts nothing."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Always False."""
        return False

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Raises RuntimeError with advice. Part of the interface before ``amp.initialize``."""
        not_served.refuse("amp.init().wrap_optimizer", RuntimeError)

    @contextlib.contextmanager
    def scale_loss(self, loss: Any, optimizer: Any) -> Iterator[Any]:
        """Context that yields `loss` unchanged."""
        yield loss

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass


def disable_casts() -> contextlib.AbstractContextManager[None]:
    """Context in which level O1 casts nothing in this thread; contexts nest."""
    handle = _amp_state.handle
    if isinstance(handle, AmpHandle) and handle._active:
        return handle.casts_disabled()
    return contextlib.nullcontext()


# --- functions that the user registers ---

#: (module, name, kind) registered since the last activation.
_registry: list[tuple[Any, str, Kind]] = []


def _decorate(function: Function, kind: Kind) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if not isinstance(handle, AmpHandle) or not handle.is_active():
            return function(*args, **kwargs)
        return handle.wrap(function, kind, apart=False)(*args, **kwargs)

    return wrapper


def half_function(fn: Function) -> Function:
    """Decorator: at O1, cast floating-point arguments of `fn` to the low-precision dtype.

    Keyword arguments and arguments inside lists, tuples and dicts are cast as well.
    """
    return _decorate(fn, Kind.LOW)


def float_function(fn: Function) -> Function:
    """Decorator: at O1, cast low-precision arguments of `fn` to float32."""
    return _decorate(fn, Kind.FLOAT32)


def promote_function(fn: Function) -> Function:
    """Decorator: at O1, cast floating-point arguments of `fn` to the widest dtype among them."""
    return _decorate(fn, Kind.PROMOTE)


def _register(module: Any, name: str, kind: Kind) -> None:
    if not hasattr(module, name):
        raise ValueError(f"{module} has no function named {name!r} to register with amp.")
    trial = PatchSet()
    trial.replace(module, name, lambda function: function)  # raises here, not in initialize
    trial.restore()
    _registry.append((module, name, kind))


def register_half_function(module: Any, name: str) -> None:
    """Like :func:`half_function` for ``module.name``, from the next initialization on.

    Raises:
        ValueError: `module` has no such attribute.
        TypeError: the attribute cannot be replaced, for example on a built-in class.
    """
    _register(module, name, Kind.LOW)


def register_float_function(module: Any, name: str) -> None:
    """Like :func:`float_function` for ``module.name``; errors as :func:`register_half_function`."""
    _register(module, name, Kind.FLOAT32)


def register_promote_function(module: Any, name: str) -> None:
    """Like :func:`promote_function` for ``module.name``; errors as
    :func:`register_half_function`."""
    _register(module, name, Kind.PROMOTE)


def init(
    enabled: bool = True,
    loss_scale: str | float = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    dtype: torch.dtype = torch.float16,
    device_types: Collection[str] | None = None,
) -> AmpHandle | NoOpHandle:
    """Turn on the casts of level O1, without changing models or optimizers.

    An earlier handle is deactivated first. Functions registered since then take effect now.
    Registrations of an active earlier handle are kept.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale, enable_caching: accepted for old scripts; losses are scaled by
            :func:`apex.amp.scale_loss` after :func:`apex.amp.initialize`.
        verbose: print every cast of a wrapper.
        allow_banned: run ``binary_cross_entropy`` on low-precision inputs in float32 instead of
            raising NotImplementedError.
        dtype: the low-precision dtype.
        device_types: device types whose tensors are cast; None: CUDA if available, else CPU.

    Returns:
        The handle, also at ``_amp_state.handle``.
    """
    del loss_scale, enable_caching
    earlier = _amp_state.handle
    registered = []
    if isinstance(earlier, AmpHandle) and earlier._active:
        registered = earlier.registered
    if earlier is not None:
        earlier._deactivate()
    if not enabled:
        _amp_state.handle = NoOpHandle()
        return _amp_state.handle
    handle = AmpHandle(dtype, device_types, verbose, allow_banned, [*registered, *_registry])
    _registry.clear()
    _amp_state.handle = handle
    return handle
