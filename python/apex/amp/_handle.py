# SPDX-License-Identifier: BSD-3-Clause
"""The handle of level O1, which turns casts on and off."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._internal import not_served
from ._amp_state import _amp_state
from .casts import CastCache
from .patch import PatchSet, install


class AmpHandle:
    """Casting at level O1, active from construction until :meth:`_deactivate`.

    See Note [Autocast is the switch] in ``patch.py``. The patches apply to the whole process. The
    switch applies to the thread that created the handle, as with ``torch.autocast``.

    Args:
        dtype: the low-precision dtype, float16 or bfloat16.
        device_types: device types whose tensors are cast; None: CUDA if available, else CPU.
        enable_caching: keep cast parameters for one iteration.
        verbose: print every cast.
        allow_banned: let ``binary_cross_entropy`` take low-precision inputs, in float32.
        registered: functions registered by the user: module, name, and how to wrap them.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        device_types: Collection[str] | None = None,
        enable_caching: bool = True,
        verbose: bool = False,
        allow_banned: bool = False,
        registered: Iterable[tuple[Any, str, Any]] = (),
    ) -> None:
        if device_types is None:
            device_types = ("cuda",) if torch.cuda.is_available() else ("cpu",)
        self.dtype = dtype
        self.device_types = frozenset(device_types)
        self.verbose = verbose
        self.allow_banned = allow_banned
        self._enable_caching = enable_caching
        self._cache = CastCache()
        self._patches = PatchSet()
        self._registered = list(registered)
        self._active = True
        self._autocast_before = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in self.device_types
        }
        self._autocast_cache_before = torch.is_autocast_cache_enabled()
        try:
            install(self, self._patches)
        except Exception:
            self._patches.restore()
            raise
        for kind in self.device_types:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)
        torch.set_autocast_cache_enabled(False)
        # Note [Writes without a version change] in casts.py.
        self._step_hook = register_optimizer_step_post_hook(self._cache.clear)
        gc.callbacks.append(self._on_collection)

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

    def caster(
        self, dtype: torch.dtype | None, function: Callable[..., Any]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that casts one tensor to `dtype` for a call of `function`.

        If `dtype` is None, it casts to autocast's current dtype. This is the handle's dtype unless
        an inner ``torch.autocast`` sets another one.
        """

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype is dtype or not tensor.is_floating_point():
                return tensor
            if not self.is_casting(tensor):
                return tensor
            target = torch.get_autocast_dtype(tensor.device.type) if dtype is None else dtype
            if tensor.dtype is target:
                return tensor
            if self.verbose:
                name = getattr(function, "__name__", repr(function))
                print(f"{tensor.dtype} -> {target} ({name})")
            if self._enable_caching and type(tensor) is torch.nn.Parameter:
                return self._cache.cast(tensor, target)
            return tensor.to(target)

        return cast

    @contextlib.contextmanager
    def casts_disabled(self, disabled: bool = True) -> Iterator[None]:
        """Context in which this thread casts nothing (or casts, if not `disabled`)."""
        with contextlib.ExitStack() as stack:
            for kind in self.device_types:
                stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
                torch.set_autocast_enabled(kind, not disabled)
            yield

    def casts_enabled(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this thread casts, if the handle is still active."""
        return self.casts_disabled(False) if self._active else contextlib.nullcontext()

    @property
    def has_cache(self) -> bool:
        """Whether cast parameters are kept for one iteration."""
        return self._enable_caching

    @property
    def cache(self) -> CastCache:
        """The current cache of cast parameters."""
        return self._cache

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Raises RuntimeError with advice. Part of the interface before ``amp.initialize``."""
        not_served.refuse("amp.init().wrap_optimizer", RuntimeError)

    def scale_loss(self, loss: Any, optimizer: Any) -> Any:
        """Raises RuntimeError with advice. Part of the interface before ``amp.initialize``."""
        not_served.refuse("amp.init().scale_loss", RuntimeError)

    def remove_cache(self, param: torch.Tensor) -> None:
        """Forget the cast of `param`, if there is one."""
        self._cache.forget(param)

    def _clear_cache(self) -> None:
        self._cache.clear()

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Drop cached casts of otherwise unreferenced parameters before a full collection."""
        if phase == "start" and info["generation"] == 2:
            self._cache.forget_dropped()

    def _deactivate(self) -> None:
        """Restore every patched function and the autocast state. Further calls do nothing."""
        if not self._active:
            return
        self._active = False
        self._patches.restore()
        self._step_hook.remove()
        gc.callbacks.remove(self._on_collection)
        self._cache.clear()
        for kind, (enabled, dtype) in self._autocast_before.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache_before)


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


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Context in which level O1 casts nothing in this thread; contexts nest."""
    handle = _amp_state.handle
    if not isinstance(handle, AmpHandle) or not handle._active:
        yield
        return
    with handle.casts_disabled():
        yield


def forget_casts() -> None:
    """Drop cached casts of level O1: Note [Writes without a version change] in ``casts.py``."""
    if _amp_state.handle is not None:
        _amp_state.handle._clear_cache()
