# SPDX-License-Identifier: BSD-3-Clause
"""Wrappers that cast arguments, and a registry that installs and removes them.

Note [Autocast is the switch]
Level O1 enables ``torch.autocast`` for the thread that called ``initialize``. It patches functions
that autocast does not cast as Apex does (most of them on the CPU, few on CUDA), and functions that
need the parameter cache. Every wrapper checks whether autocast is on for the device of a tensor. So
``disable_casts``, ``torch.autocast(..., enabled=False)``, activation checkpointing (whose
recomputation restores the autocast state of the forward) and libraries that check
``torch.is_autocast_enabled`` all agree. Autocast's own weight cache is off, because a copy made
under ``no_grad`` would be used in training and lose the gradient.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .._internal.dtypes import is_low_precision
from .._internal.tree import find_tensors, map_tensors
from .lists import defaults, functional_overrides, tensor_overrides, torch_overrides

if TYPE_CHECKING:
    from ._handle import AmpHandle

Function = Callable[..., Any]
_MISSING = object()


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
        self._undo()
        self._replaced.clear()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which all replacements are undone, in all threads."""
        present = [
            (namespace, name, vars(namespace)[name]) for namespace, name, _ in self._replaced
        ]
        self._undo()
        try:
            yield
        finally:
            for namespace, name, value in present:
                setattr(namespace, name, value)

    def _undo(self) -> None:
        for namespace, name, own in reversed(self._replaced):
            if own is _MISSING:
                delattr(namespace, name)
            else:
                setattr(namespace, name, own)


def _floating_tensors(*values: Any) -> list[torch.Tensor]:
    found = find_tensors(values)
    return [tensor for tensor in found if tensor.is_floating_point()]


def _writes_to_out(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("out") is not None


def _cast_low(handle: AmpHandle, original: Function, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """`args` and `kwargs` in the low-precision dtype, unless all floating-point tensors are
    double."""
    if _writes_to_out(kwargs):
        return args, kwargs
    dtypes = {tensor.dtype for tensor in _floating_tensors(args, kwargs)}
    if dtypes <= {torch.float64}:
        return args, kwargs
    cast = handle.caster(None, original)
    return map_tensors(args, cast), map_tensors(kwargs, cast)


def wrap_low_precision(handle: AmpHandle, original: Function) -> Function:
    """Cast floating-point arguments to the handle's low-precision dtype, but keep all-double
    calls."""
    cast = handle.caster(None, original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.any_casting():
            return original(*args, **kwargs)
        if not kwargs:
            # The fast path, which almost every call takes.
            simple: list[Any] = []
            for arg in args:
                if isinstance(arg, torch.Tensor):
                    if arg.dtype is torch.float64:
                        break
                    simple.append(cast(arg))
                elif arg is None or isinstance(arg, (int, float, str)):
                    simple.append(arg)
                else:
                    break
            else:
                return original(*simple)
        args, kwargs = _cast_low(handle, original, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


def wrap_recurrent(handle: AmpHandle, original: Function) -> Function:
    """Like :func:`wrap_low_precision`, for the kernels of ``torch._VF``.

    Autocast has a float16 cast for cuDNN's recurrent networks that also packs the weights in
    cuDNN's layout, so float16 is left to autocast. It supports only float16, so it must not see
    bfloat16.
    """
    cell = original.__name__.endswith("_cell")

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.any_casting():
            return original(*args, **kwargs)
        if not cell and args[0].is_cuda and torch.get_autocast_dtype("cuda") == torch.float16:
            return original(*args, **kwargs)
        args, kwargs = _cast_low(handle, original, args, kwargs)
        with handle.casts_disabled():
            return original(*args, **kwargs)

    return wrapper


def wrap_float32(handle: AmpHandle, original: Function) -> Function:
    """Cast low-precision arguments to float32."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.any_casting() or _writes_to_out(kwargs):
            return original(*args, **kwargs)
        widen = handle.caster(torch.float32, original)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return widen(tensor) if is_low_precision(tensor) else tensor

        return original(*map_tensors(args, cast), **map_tensors(kwargs, cast))

    return wrapper


def wrap_float32_to_one_number(handle: AmpHandle, original: Function) -> Function:
    """Like :func:`wrap_float32`, for calls with a tensor and without a dimension or dtype."""
    widened = wrap_float32(handle, original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        whole = len(args) + len(kwargs) == 1
        return (widened if whole else original)(*args, **kwargs)

    return wrapper


def wrap_promote(handle: AmpHandle, original: Function) -> Function:
    """Cast floating-point arguments to the widest floating-point dtype among them."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.any_casting() or _writes_to_out(kwargs):
            return original(*args, **kwargs)
        dtypes = {tensor.dtype for tensor in _floating_tensors(args, kwargs)}
        if len(dtypes) < 2:
            return original(*args, **kwargs)
        cast = handle.caster(functools.reduce(torch.promote_types, dtypes), original)
        return original(*map_tensors(args, cast), **map_tensors(kwargs, cast))

    return wrapper


def wrap_cast_to_self(handle: AmpHandle, original: Function) -> Function:
    """For in-place methods: cast the other floating-point arguments to the dtype of the first."""

    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not handle.is_casting(self) or not self.is_floating_point():
            return original(self, *args, **kwargs)
        cast = handle.caster(self.dtype, original)
        return original(self, *map_tensors(args, cast), **map_tensors(kwargs, cast))

    return wrapper


def wrap_in_place_float32(handle: AmpHandle, original: Function, name: str) -> Function:
    """Refuse an in-place float32 function on a low-precision tensor."""

    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_low_precision(self) and handle.is_casting(self):
            raise NotImplementedError(
                f"Tensor.{name} runs in float32 under amp O1 and cannot write its result into a "
                f"{self.dtype} tensor; use the out-of-place form, or cast to float32 first."
            )
        return original(self, *args, **kwargs)

    return wrapper


def wrap_banned(handle: AmpHandle, original: Function, name: str, remedy: str) -> Function:
    """Refuse low-precision arguments, or cast them to float32 if the handle allows it."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if is_low_precision(tensor) else tensor

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors = _floating_tensors(args, kwargs)
        if not any(handle.is_casting(tensor) for tensor in tensors):
            return original(*args, **kwargs)
        if any(map(is_low_precision, tensors)):
            if not handle.allow_banned:
                raise NotImplementedError(
                    f"{name} is not safe on float16 or bfloat16 under amp O1: {remedy}."
                )
            args = map_tensors(args, widen)
            kwargs = map_tensors(kwargs, widen)
        # torch.autocast refuses this function on CUDA, even for float32 inputs.
        with handle.casts_disabled():
            return original(*args, **kwargs)

    return wrapper


def wrap_backward(handle: AmpHandle, original: Function) -> Function:
    """Run the backward pass with casts off, as torch.autocast recommends, and end the iteration.

    See Note [Writes without a version change] in ``casts.py``. `original` is the internal function
    that ``Tensor.backward``, ``torch.autograd.backward`` and ``grad`` all call. Scripts may have
    imported these three before they could be replaced.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            with handle.casts_disabled():
                return original(*args, **kwargs)
        finally:
            handle._clear_cache()

    return wrapper


def wrap_uncast(handle: AmpHandle, original: Function) -> Function:
    """Run with casts off, because autocast would apply its own lists inside the function."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle.any_casting():
            return original(*args, **kwargs)
        with handle.casts_disabled():
            return original(*args, **kwargs)

    return wrapper


def wrap_script(patches: PatchSet, original: Function) -> Function:
    """Compile with torch's original functions, because TorchScript does not know the replacements.

    torch itself also scripts functions, for example at the first forward-mode derivative.
    """

    @functools.wraps(original)
    def script(
        obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        with patches.suspended():
            return original(obj, optimize, _frames_up + 1, *args, **kwargs)

    return script


#: The wrapper of a function, and the remedy if the function is banned.
_Kind = tuple[Callable[..., Function], str]


def _kinds(overrides: Any) -> dict[str, _Kind]:
    """The wrapper of each function in one namespace. The first list that names it applies."""
    kinds: dict[str, _Kind] = {}
    for names, wrap in (
        (overrides.FP16_FUNCS, wrap_low_precision),
        (overrides.FP32_FUNCS, wrap_float32),
        (overrides.CASTS, wrap_promote),
        (overrides.SEQUENCE_CASTS, wrap_promote),
        (defaults.FLOAT32_TO_ONE_NUMBER, wrap_float32_to_one_number),
    ):
        for name in names:
            if hasattr(overrides.MODULE, name):
                kinds.setdefault(name, (wrap, ""))
    for name, remedy in overrides.BANNED_FUNCS:
        kinds.setdefault(name, (wrap_banned, remedy))
    return kinds


_OVERRIDES = (torch_overrides, functional_overrides, tensor_overrides)
#: The wrappers before a script changes the lists.
_DEFAULTS = [_kinds(overrides) for overrides in _OVERRIDES]
#: Functions with special wrappers.
_APART = {"__ipow__"}
_NOT_PATCHED = {*defaults.PROMOTED_BY_TORCH, *defaults.SEQUENCES_PROMOTED_BY_TORCH}


def _install_lists(handle: AmpHandle, patches: PatchSet) -> None:
    """Patch the functions in the lists.

    Casts are off inside a function that promotes, or that a script has moved to another list or
    removed. Otherwise autocast would apply its own lists.
    """
    registered = {(id(module), name) for module, name, _ in handle._registered}
    for overrides, unchanged in zip(_OVERRIDES, _DEFAULTS, strict=True):
        present = _kinds(overrides)
        for name in {**unchanged, **present}:
            kind, default = present.get(name), unchanged.get(name)
            if name in _APART or (kind == default and name in _NOT_PATCHED):
                continue
            if (id(overrides.MODULE), name) in registered:
                continue
            if kind != default or name in defaults.PROMOTE:
                patches.replace(overrides.MODULE, name, functools.partial(wrap_uncast, handle))
            if kind is None:
                continue
            wrap, remedy = kind
            more = {"name": name, "remedy": remedy} if wrap is wrap_banned else {}
            patches.replace(overrides.MODULE, name, functools.partial(wrap, handle, **more))


def _install_registered(handle: AmpHandle, patches: PatchSet) -> None:
    """Patch the functions that the user has registered. Registrations override the lists.

    torch's own functions run with casts off inside, because autocast would apply its own lists.
    """
    for module, name, wrap in handle._registered:
        if any(module is overrides.MODULE for overrides in _OVERRIDES):
            patches.replace(module, name, functools.partial(wrap_uncast, handle))
        patches.replace(module, name, functools.partial(wrap, handle))


def _in_place_float32() -> tuple[str, ...]:
    """The in-place methods of Tensor that correspond to float32 functions, such as ``exp_``."""
    listed = tensor_overrides.FP32_FUNCS
    names = [f"{name}_" for name in listed if not name.startswith("__")]
    own = ("__ipow__",) if "__ipow__" in listed else ()
    return tuple(name for name in names if hasattr(torch.Tensor, name)) + own


def install(handle: AmpHandle, patches: PatchSet) -> None:
    """Patch everything that :mod:`apex.amp.lists` names, and autograd's entry to backward."""
    _install_registered(handle, patches)
    _install_lists(handle, patches)
    for name in defaults.LOW_PRECISION_RECURRENT:
        patches.replace(torch._VF, name, functools.partial(wrap_recurrent, handle))
    for name in defaults.CAST_TO_SELF:
        patches.replace(torch.Tensor, name, functools.partial(wrap_cast_to_self, handle))
    for name in _in_place_float32():
        patches.replace(
            torch.Tensor, name, functools.partial(wrap_in_place_float32, handle, name=name)
        )
    for name in ("torch.jit", "torch.jit._script", "torch.jit._trace"):
        if hasattr(sys.modules.get(name), "script"):
            patches.replace(sys.modules[name], "script", functools.partial(wrap_script, patches))
    # A context of torch.compiler assigns one of the two to the other.
    for module in (torch.autograd, torch.autograd.graph):
        patches.replace(module, "_engine_run_backward", functools.partial(wrap_backward, handle))
