# SPDX-License-Identifier: BSD-3-Clause
"""Converts the batch norms of a model to synchronized ones."""

from __future__ import annotations

import types
import warnings
import weakref
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .sync_batchnorm import SyncBatchNorm, name_layers
from .syncbn_group import create_syncbn_process_group, group_name_of

__all__ = ["convert_syncbn_model", "create_syncbn_process_group"]

_PLAIN = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
    _BatchNorm,
)


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
        TypeError: for a batch norm whose ``forward`` was replaced on the module, a compiled one,
            and a lazy one that has not seen its first input; the error names its place.
        ValueError: if this rank is not a member of the process group.
            In all cases, nothing has been changed.
    """
    _refuse(module)
    made = {
        id(child): _to_sync(child, process_group, channel_last)
        for child in module.modules()
        if type(child) in _PLAIN
    }
    synchronized = [child for child in module.modules() if isinstance(child, SyncBatchNorm)]
    if synchronized:
        group_name_of(process_group)
    _warn_of_others(module)
    # From here on, no error is raised.
    for child in synchronized:
        if process_group is not None:
            child.process_group = process_group
        child.channel_last = child.channel_last or channel_last
    for converted in made.values():
        hooks: dict[int, Any] = converted._load_state_dict_pre_hooks
        for hook in hooks.values():
            if getattr(hook, "with_module", False):  # such a hook references its module weakly
                hook.module = weakref.ref(converted)
    for parent in list(module.modules()):
        for name, part in parent._modules.items():
            if id(part) in made:
                parent._modules[name] = made[id(part)]
    result = made.get(id(module), module)
    name_layers(result)
    return result


def _place(name: str) -> str:
    return f"module '{name}'" if name else "the module"


def _refuse(module: Module) -> None:
    """Raise TypeError for a batch norm without a shape, or that other code would still call."""
    for name, child in module.named_modules():
        # the module that torch.compile(module) wraps
        inner = dict(child.named_children()).get("_orig_mod")
        problem = ""
        if isinstance(child, _BatchNorm) and isinstance(child, LazyModuleMixin):
            problem = (
                f"is a {type(child).__name__} that does not know its number of channels yet; run "
                "one batch through the model first"
            )
        elif type(inner) in _PLAIN or (
            type(child) in _PLAIN and child._compiled_call_impl is not None
        ):
            problem = (
                "is compiled, and would still call the old batch norm after conversion. Convert "
                "first and compile afterwards"
            )
        elif type(child) in _PLAIN and "forward" in vars(child):
            problem = (
                "has a forward that was replaced on the module itself, and would still call the "
                "old module after conversion. Convert first and replace it afterwards"
            )
        if problem:
            raise TypeError(f"convert_syncbn_model: {_place(name)} {problem}.")


def _warn_of_others(module: Module) -> None:
    """Name the batch norms that are not converted, once for each class."""
    kinds = {kind.__name__ for kind in _PLAIN}
    by_class: dict[str, list[str]] = {}
    for name, child in module.named_modules():
        kind = type(child)
        if isinstance(child, torch.jit.ScriptModule) and child.original_name in kinds:
            by_class.setdefault(f"a scripted {child.original_name}", []).append(name)
        elif isinstance(child, _BatchNorm) and kind not in _PLAIN:
            if not isinstance(child, SyncBatchNorm):
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


def _to_sync(source: Module, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    """A module with all of ``source``: the same parameters, buffers, hooks (whose handles still
    remove them) and attributes."""
    result = SyncBatchNorm.__new__(SyncBatchNorm)
    state = source.__dict__.copy()
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        state[name] = state[name].copy()
    for name, value in state.items():
        if isinstance(value, types.MethodType) and value.__self__ is source:
            state[name] = types.MethodType(value.__func__, result)
    own_group = state.pop("process_group", None)
    result.__dict__.update(state)
    result.process_group = own_group if process_group is None else process_group
    result.channel_last = channel_last
    result.fuse_relu = False
    return result
