# SPDX-License-Identifier: BSD-3-Clause
"""``DistributedDataParallel(mixed_precision=...)``: forward in a low-precision dtype, parameters in
their own dtype."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn

from apex import _core
from apex._internal.tree import find_tensors, map_tensors

BUILTIN_HOOKS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class MixedPrecision:
    """Runs a module with casts of its parameters, buffers and inputs.

    Gradients flow back through the casts, so ``.grad``, parameters and buffers keep their own
    dtypes, also in checkpoints.

    Args:
        given: an object with the attributes ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``
            (each a floating-point dtype or None), as torch's ``_MixedPrecision``.

    Raises:
        TypeError: for any other object.
    """

    def __init__(self, given: Any) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(given, name, "missing")
            floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if dtype is not None and not floating:
                raise TypeError(
                    "mixed_precision takes an object with param_dtype, reduce_dtype and "
                    f"buffer_dtype, each a floating torch.dtype or None; {name} is {dtype!r}."
                )
        self.param_dtype: torch.dtype | None = given.param_dtype
        self.buffer_dtype: torch.dtype | None = given.buffer_dtype
        self.reduce_dtype: torch.dtype | None = given.reduce_dtype or given.param_dtype
        # torch's class has no such attribute, and inputs are cast.
        self.cast_forward_inputs = bool(getattr(given, "cast_forward_inputs", True))
        self.in_place = False  # True while the module's parameters and buffers are casts

    @property
    def communication_hook(self) -> str | None:
        """The built-in communication hook for ``reduce_dtype``; None: gradients are not cast."""
        return BUILTIN_HOOKS.get(self.reduce_dtype) if self.reduce_dtype is not None else None

    def describe(self) -> str:
        """The settings that must be equal on all ranks."""
        names = ("param_dtype", "reduce_dtype", "buffer_dtype")
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)

    def enter(
        self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Casts | None]:
        """Before forward: cast the inputs, and replace the module's own tensors by casts.

        Returns the inputs of forward, and the argument of :meth:`put_back` and :meth:`leave`.
        """
        if self.cast_forward_inputs and self.param_dtype is not None:
            inputs, kwargs = map_tensors((inputs, kwargs), self._cast_input)
        if self.in_place:  # forward runs again within backward
            return inputs, kwargs, None
        casts = Casts(module, self.param_dtype, self.buffer_dtype)
        self._put_in(casts)
        return inputs, kwargs, casts

    def put_back(self, casts: Casts) -> None:
        """After forward: restore the module's own tensors, with the changes of forward to buffers.

        Also call it after a failed forward, which may have changed buffers.
        """
        try:
            casts.keep_changed_buffers()
        finally:
            self._take_out(casts)

    def leave(self, module: nn.Module, casts: Casts, output: Any, training: bool) -> None:
        """After a successful forward, parts of which may run again in backward."""
        if training and casts:
            self._use_in_backward(module, casts, output)

    def _take_out(self, casts: Casts) -> None:
        casts.take_out()
        self.in_place = False

    def _put_in(self, casts: Casts) -> None:
        casts.put_in()
        self.in_place = True

    def _cast_input(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor

    # Note [Casts in backward]
    #
    # Under activation checkpointing, parts of forward run again within backward. They must use the
    # same tensors as in forward. So the casts of that forward replace the module's own tensors
    # while its backward runs, from the first gradient of an output to the end. Afterwards the
    # module has the tensors from the beginning of backward, and not from before forward, because
    # forward may have assigned a buffer. Buffer changes by the second run of a part are dropped.

    def _use_in_backward(self, module: nn.Module, casts: Casts, output: Any) -> None:
        tensors = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
        if not tensors:
            return
        kept = [casts]  # released by the first backward, even if an output is still referenced
        reference = weakref.ref(module)  # weak, because the module may hold an output

        def begin(_: torch.Tensor) -> None:
            module = reference()
            if self.in_place or module is None:
                return
            with torch.enable_grad():
                casts = kept.pop() if kept else Casts(module, self.param_dtype, self.buffer_dtype)
            self._put_in(casts)
            ends = _EndOfBackward(lambda: self._take_out(casts))
            torch.autograd.Variable._execution_engine.queue_callback(ends)

        torch.autograd.graph.register_multi_grad_hook(tensors, begin, mode="any")


class _EndOfBackward:
    """Runs an action when backward ends, or when the autograd engine drops it after a failure."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    __del__ = __call__


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor.to(dtype)``, whose backward also accepts sparse gradients."""
    if type(tensor) is torch.Tensor or type(tensor).__torch_function__ is _NO_FUNCTION:
        return _core.cast(tensor, dtype)
    return tensor.to(dtype)  # a class with its own functions defines its own cast


_NO_FUNCTION = torch._C._disabled_torch_function_impl
_NOTHING: Any = object()


@dataclasses.dataclass
class _Entry:
    members: MutableMapping[str, Any]  # _parameters or _buffers of a module
    name: str
    own: torch.Tensor
    cast: torch.Tensor
    # the module's tensor that the cast replaces and that is restored later
    displaced: Any = _NOTHING

    def put_in(self) -> None:
        self.displaced = self.members[self.name] if self.name in self.members else _NOTHING
        if self.displaced is not _NOTHING:
            self.members[self.name] = self.cast

    @property
    def present(self) -> Any:
        """The module's current tensor; ``_NOTHING`` if it has removed it."""
        if self.displaced is _NOTHING or self.name not in self.members:
            return _NOTHING
        return self.members[self.name]


class Casts:
    """Casts of a module's parameters and buffers, which can replace the module's own tensors."""

    def __init__(
        self, module: nn.Module, parameters: torch.dtype | None, buffers: torch.dtype | None
    ) -> None:
        self._parameters: list[_Entry] = []
        self._buffers: list[_Entry] = []
        made: dict[int, torch.Tensor] = {}  # shared tensors stay shared
        for part in module.modules():
            for members, dtype, entries in (
                (part._parameters, parameters, self._parameters),
                (part._buffers, buffers, self._buffers),
            ):
                for name, own in members.items():
                    if dtype is None or own is None or own.dtype == dtype:
                        continue
                    if not own.is_floating_point():
                        continue
                    if id(own) not in made:
                        made[id(own)] = _cast(own, dtype)
                    entries.append(_Entry(members, name, own, made[id(own)]))

    def __bool__(self) -> bool:
        return bool(self._parameters or self._buffers)

    def put_in(self) -> None:
        for entry in (*self._parameters, *self._buffers):
            entry.put_in()

    def take_out(self) -> None:
        """Restore the replaced tensors, except parameters that forward has replaced."""
        for entry in self._parameters:
            if entry.present is entry.cast:
                entry.members[entry.name] = entry.displaced
        for entry in self._buffers:
            if entry.present is not _NOTHING:
                entry.members[entry.name] = entry.displaced

    def keep_changed_buffers(self) -> None:
        """Copy the values of buffers after forward into the module's own buffers, in their
        dtypes."""
        assigned: dict[int, torch.Tensor] = {}  # shared tensors stay shared
        for entry in self._buffers:
            present, own = entry.present, entry.own
            if present is entry.cast:
                _copy_changed(own, entry.cast)
            elif isinstance(present, torch.Tensor):
                if present.is_floating_point() and present.dtype != own.dtype:
                    if id(present) not in assigned:
                        assigned[id(present)] = _cast(present, own.dtype)
                    present = assigned[id(present)]
                entry.displaced = present
            elif present is None:
                entry.displaced = None


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _copy_changed(own: torch.Tensor, cast: torch.Tensor) -> None:
    """Copy into `own` the elements of `cast` that differ from its cast; others keep full precision.

    Version counters cannot detect changes, because some kernels do not increment them.
    """
    bits = _BITS[cast.element_size()]
    changed = cast.view(bits) != own.to(cast.dtype).view(bits)  # bitwise, so a NaN equals itself
    if changed.any():
        own.copy_(torch.where(changed, cast.to(own.dtype), own))
