# SPDX-License-Identifier: BSD-3-Clause
"""Functions that the user registers to run in a given dtype, and :func:`init`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from ._amp_state import _amp_state
from ._handle import AmpHandle, NoOpHandle
from .patch import Function, PatchSet, wrap_float32, wrap_low_precision, wrap_promote

Wrap = Callable[[AmpHandle, Function], Function]

#: (module, name, wrap) registered since the last activation.
_registry: list[tuple[Any, str, Wrap]] = []


def _decorate(function: Function, wrap: Wrap) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if not isinstance(handle, AmpHandle) or not handle.is_active():
            return function(*args, **kwargs)
        return wrap(handle, function)(*args, **kwargs)

    return wrapper


def half_function(fn: Function) -> Function:
    """Decorator: at O1, cast floating-point arguments of `fn` to the low-precision dtype.

    Keyword arguments and arguments inside lists, tuples and dicts are cast as well.
    """
    return _decorate(fn, wrap_low_precision)


def float_function(fn: Function) -> Function:
    """Decorator: at O1, cast low-precision arguments of `fn` to float32."""
    return _decorate(fn, wrap_float32)


def promote_function(fn: Function) -> Function:
    """Decorator: at O1, cast floating-point arguments of `fn` to the widest dtype among them."""
    return _decorate(fn, wrap_promote)


def _register(module: Any, name: str, wrap: Wrap) -> None:
    if not hasattr(module, name):
        raise ValueError(f"{module} has no function named {name!r} to register with amp.")
    trial = PatchSet()
    trial.replace(module, name, lambda function: function)  # raises here, not in initialize
    trial.restore()
    _registry.append((module, name, wrap))


def register_half_function(module: Any, name: str) -> None:
    """Like :func:`half_function` for ``module.name``, from the next initialization on.

    Raises:
        ValueError: `module` has no such attribute.
        TypeError: the attribute cannot be replaced, for example on a built-in class.
    """
    _register(module, name, wrap_low_precision)


def register_float_function(module: Any, name: str) -> None:
    """Like :func:`float_function` for ``module.name``, from the next initialization on.

    Raises:
        ValueError: `module` has no such attribute.
        TypeError: the attribute cannot be replaced, for example on a built-in class.
    """
    _register(module, name, wrap_float32)


def register_promote_function(module: Any, name: str) -> None:
    """Like :func:`promote_function` for ``module.name``, from the next initialization on.

    Raises:
        ValueError: `module` has no such attribute.
        TypeError: the attribute cannot be replaced, for example on a built-in class.
    """
    _register(module, name, wrap_promote)


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
        loss_scale: accepted for old scripts; losses are scaled by :func:`apex.amp.scale_loss`
            after :func:`apex.amp.initialize`.
        enable_caching: keep cast parameters for one iteration.
        verbose: print every cast.
        allow_banned: run ``binary_cross_entropy`` on low-precision inputs in float32 instead of
            raising NotImplementedError.
        dtype: the low-precision dtype.
        device_types: device types whose tensors are cast; None: CUDA if available, else CPU.

    Returns:
        The handle, also at ``_amp_state.handle``.
    """
    del loss_scale
    earlier = _amp_state.handle
    registered = []
    if isinstance(earlier, AmpHandle) and earlier._active:
        registered = earlier._registered
    if earlier is not None:
        earlier._deactivate()
    if not enabled:
        _amp_state.handle = NoOpHandle()
        return _amp_state.handle
    registered = [*registered, *_registry]
    handle = AmpHandle(dtype, device_types, enable_caching, verbose, allow_banned, registered)
    _registry.clear()
    _amp_state.handle = handle
    return handle
