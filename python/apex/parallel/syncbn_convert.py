# SPDX-License-Identifier: BSD-3-Clause
"""Converts the batch norms of a model to synchronized ones, and back."""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .sync_batchnorm import SyncBatchNorm, name_layers
from .syncbn_group import create_syncbn_process_group, group_name_of

_M = TypeVar("_M", bound=Module)

__all__ = ["convert_syncbn_model", "create_syncbn_process_group", "revert_syncbn_model"]

_PLAIN = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
    _BatchNorm,
)


class _BatchNormAnyRank(_BatchNorm):
    """Plain batch norm for ``[N, C, *]`` of any number of dimensions. A SyncBatchNorm that was not
    converted from another class is reverted to it."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def convert_syncbn_model(
    module: Module, process_group: Any = None, channel_last: bool = False
) -> Module:
    """Replace every ``torch.nn.BatchNorm*d`` and ``torch.nn.SyncBatchNorm`` in ``module`` by
    :class:`SyncBatchNorm`, and return the module.

    If ``module`` itself is a batch norm, the result is a new module. Any other module is changed in
    place. Parameters and buffers stay the same objects, so an optimizer keeps working. They keep
    ``requires_grad``, dtype and device. Modules keep their training flag, hooks, names and
    attributes. A module that is used in two places stays one module. InstanceNorm and all other
    modules are not changed. Not collective: it does not communicate, and ranks may convert at
    different times.

    Args:
        module: the model.
        process_group: given to every converted module. None means all ranks, except that a
            ``torch.nn.SyncBatchNorm`` keeps its group.
        channel_last: given to every converted module: the inputs are ``[N, *, C]``.

    Two kinds are not converted, so their statistics stay local to each rank, and a UserWarning
    names them. The first is a batch norm of a derived class, whose behavior would be lost (timm's
    ``BatchNormAct2d``). Replace it manually. The second is a scripted or traced batch norm. Convert
    before tracing; a SyncBatchNorm cannot be scripted.

    Raises:
        TypeError: for a batch norm whose ``forward`` was replaced on the module; the error names
            its place in the model. Also for a lazy batch norm that has not seen its first input,
            and for a compiled one.
        ValueError: if this rank is not a member of the process group.
            In all cases, nothing has been changed.
    """
    _refuse("convert_syncbn_model", module, _is_plain)
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and isinstance(child, LazyModuleMixin):
            raise TypeError(
                f"convert_syncbn_model: {_place(name)} is a {type(child).__name__} that does not "
                "know its number of channels yet; run one batch through the model first."
            )
    made = _make(module, _is_plain, lambda m: _to_sync(m, process_group, channel_last))
    synchronized = [child for child in module.modules() if _is_synchronized(child)]
    if synchronized:
        group_name_of(process_group)
    _warn_of_others(module)
    # From here on, no error is raised.
    for child in synchronized:
        if process_group is not None:
            child.process_group = process_group
        child.channel_last = child.channel_last or channel_last
    converted = _exchange(module, made)
    name_layers(converted)
    return converted


def revert_syncbn_model(module: Module) -> Module:
    """The inverse of :func:`convert_syncbn_model`: plain batch norms again.

    A converted module gets its original class back. A module that was constructed as a
    SyncBatchNorm becomes a batch norm for ``[N, C, *]`` of any number of dimensions. Modules of
    derived classes stay.

    Raises:
        ValueError: for a module that fuses a ReLU, or was constructed with ``channel_last``. Plain
            batch norm has neither.
        TypeError: for a SyncBatchNorm whose ``forward`` was replaced, or a compiled one. In all
            cases, nothing has been changed.
    """
    _refuse("revert_syncbn_model", module, _is_exact)
    for name, child in module.named_modules():
        if _is_exact(child):
            if child.fuse_relu:
                raise ValueError(
                    f"revert_syncbn_model: {_place(name)} fuses a ReLU, which plain batch norm "
                    "does not support; set fuse_relu=False and add the ReLU to the model."
                )
            if child.channel_last and "_converted_from" not in child.__dict__:
                raise ValueError(
                    f"revert_syncbn_model: {_place(name)} takes [N, *, C] input "
                    "(channel_last=True), which plain batch norm does not support; convert that "
                    "part of the model manually."
                )
    return _exchange(module, _make(module, _is_exact, _to_plain))


def _place(name: str) -> str:
    return f"module '{name}'" if name else "the module"


def _is_synchronized(module: Module) -> TypeGuard[SyncBatchNorm]:
    return isinstance(module, SyncBatchNorm)


def _is_exact(module: Module) -> TypeGuard[SyncBatchNorm]:
    return type(module) is SyncBatchNorm


def _is_plain(module: Module) -> bool:
    return type(module) in (*_PLAIN, _BatchNormAnyRank)


def _refuse(caller: str, module: Module, applies: Callable[[Module], bool]) -> None:
    """Raise TypeError for a batch norm that code outside of the model would still call."""
    for name, child in module.named_modules():
        # the module that torch.compile(module) wraps
        inner = dict(child.named_children()).get("_orig_mod")
        in_place = applies(child) and child._compiled_call_impl is not None
        if in_place or (inner is not None and applies(inner)):
            raise TypeError(
                f"{caller}: {_place(name)} is compiled, and would still call the old batch norm "
                "after conversion. Convert first and compile afterwards."
            )
        if applies(child) and "forward" in vars(child):
            raise TypeError(
                f"{caller}: forward of {_place(name)} was replaced on the module itself, and would "
                "still call the old module after conversion. Convert first and replace it "
                "afterwards."
            )


def _warn_of_others(module: Module) -> None:
    """Name the batch norms that are not converted, once for each class."""
    kinds = {kind.__name__ for kind in _PLAIN}
    by_class: dict[str, list[str]] = {}
    for name, child in module.named_modules():
        kind = type(child)
        if isinstance(child, torch.jit.ScriptModule) and child.original_name in kinds:
            by_class.setdefault(f"a scripted {child.original_name}", []).append(name)
        elif isinstance(child, _BatchNorm) and not (_is_plain(child) or _is_synchronized(child)):
            by_class.setdefault(f"{kind.__module__}.{kind.__qualname__}", []).append(name)
    for what, names in by_class.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"convert_syncbn_model: {_place(names[0])}{more} ({what}) was not converted, and its "
            "statistics stay per rank. Replace a batch norm of a derived class manually, and "
            "convert the model before torch.jit.trace (torch.jit.script does not take "
            "SyncBatchNorm).",
            stacklevel=3,
        )


def _make(
    module: Module, applies: Callable[[Module], bool], make: Callable[[Module], Module]
) -> dict[int, tuple[Module, Module]]:
    """By id, each module to replace and its replacement. Nothing is changed yet."""
    return {id(child): (child, make(child)) for child in module.modules() if applies(child)}


def _exchange(module: Module, made: dict[int, tuple[Module, Module]]) -> Module:
    for _, result in made.values():
        hooks: dict[int, Any] = result._load_state_dict_pre_hooks
        for hook in hooks.values():
            if getattr(hook, "with_module", False):  # such a hook references its module weakly
                hook.module = weakref.ref(result)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in made:
                parent._modules[name] = made[id(child)][1]
    return made[id(module)][1] if id(module) in made else module


def _transplant(source: Module, kind: type[_M]) -> _M:
    """A module of class ``kind`` with all of ``source``: the same parameters, buffers, hooks (whose
    handles still remove them) and attributes."""
    result = kind.__new__(kind)
    state = source.__dict__.copy()
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        state[name] = state[name].copy()
    for name, value in state.items():
        if isinstance(value, types.MethodType) and value.__self__ is source:
            state[name] = types.MethodType(value.__func__, result)
    result.__dict__.update(state)
    return result


def _to_sync(module: Module, process_group: Any, channel_last: bool) -> Module:
    result = _transplant(module, SyncBatchNorm)
    own_group = result.__dict__.pop("process_group", None)
    result.process_group = process_group if process_group is not None else own_group
    result.channel_last = channel_last
    result.fuse_relu = False
    result._converted_from = type(module)
    return result


def _to_plain(module: Module) -> Module:
    kind: type[Module] = module.__dict__.get("_converted_from", _BatchNormAnyRank)
    result = _transplant(module, kind)
    for name in (
        "_process_group",
        "_process_group_name",
        "_converted_from",
        "_layer_name",
        "channel_last",
        "fuse_relu",
    ):
        result.__dict__.pop(name, None)
    if issubclass(kind, torch.nn.SyncBatchNorm):
        result.process_group = module.process_group
    return result
