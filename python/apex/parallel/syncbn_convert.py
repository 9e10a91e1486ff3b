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
# Names that a subclass may define without changing the behavior of batch norm.
_HARMLESS = {"__init__", "extra_repr", "__repr__", "__str__", "__annotate__", "__annotate_func__",
             "__dict__", "__weakref__", "__init_subclass__", "__class_getitem__"}  # fmt: skip


class _BatchNormAnyRank(_BatchNorm):
    """Plain batch norm for ``[N, C, *]`` of any number of dimensions. A SyncBatchNorm that was not
    converted from another class is reverted to it."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_KNOWN = {base for kind in (*_PLAIN, SyncBatchNorm, _BatchNormAnyRank) for base in kind.__mro__}


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
    names them. The first is a batch norm whose class or mixin has its own behavior, which would be
    lost (timm's ``BatchNormAct2d``). Replace it manually. The second is a scripted or traced batch
    norm. Convert before tracing; a SyncBatchNorm cannot be scripted.

    Raises:
        TypeError: for a batch norm with behavior set on the module (``forward``); the error names
            its place in the model. Also for a lazy batch norm that has not seen its first input,
            and for a compiled one.
        ValueError: if this rank is not a member of the process group.
            In all cases, nothing has been changed.
    """
    left = _with_own_class(module)
    for name, child in module.named_modules():
        if _is_plain(child) and id(child) not in left:
            _refuse_lazy(name, child)
            _refuse_own_behaviour("convert_syncbn_model", name, child)
        _refuse_compiled("convert_syncbn_model", name, child, _is_plain)
    made = _make(
        module,
        lambda m: _is_plain(m) and id(m) not in left,
        lambda m: _to_sync(m, process_group, channel_last),
    )
    synchronized = [child for child in module.modules() if _is_synchronized(child)]
    if synchronized:
        group_name_of(process_group)
    _warn_of_own_classes(left)
    _warn_of_scripted(module)
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
    SyncBatchNorm becomes a batch norm for ``[N, C, *]`` of any number of dimensions.

    Raises:
        ValueError: for a module that fuses a ReLU, or was constructed with ``channel_last``. Plain
            batch norm has neither.
        TypeError: for a SyncBatchNorm with its own behavior, or a compiled one. In all cases,
            nothing has been changed.
    """
    for name, child in module.named_modules():
        _refuse_compiled("revert_syncbn_model", name, child, _is_synchronized)
        if _is_synchronized(child):
            _refuse_own_behaviour("revert_syncbn_model", name, child)
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
    return _exchange(module, _make(module, _is_synchronized, _to_plain))


def _place(name: str) -> str:
    return f"module '{name}'" if name else "the module"


def _is_synchronized(module: Module) -> TypeGuard[SyncBatchNorm]:
    return isinstance(module, SyncBatchNorm)


def _is_plain(module: Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def _is_lazy(module: Module) -> bool:
    return isinstance(module, torch.nn.modules.lazy.LazyModuleMixin)


def _refuse_lazy(name: str, module: Module) -> None:
    if _is_lazy(module):
        raise TypeError(
            f"convert_syncbn_model: {_place(name)} is a {type(module).__name__} that does not know "
            "its number of channels yet; run one batch through the model first."
        )


def _refuse_own_behaviour(caller: str, name: str, module: Module) -> None:
    kind = type(module)
    of_class, of_module = _own_behaviour(module)
    if of_class:
        raise TypeError(
            f"{caller}: {_place(name)} is a {kind.__module__}.{kind.__qualname__}, which defines "
            f"{', '.join(of_class)}, and conversion would lose this. Replace it manually, or by a "
            "plain torch.nn.BatchNorm."
        )
    if of_module:
        raise TypeError(
            f"{caller}: {', '.join(of_module)} of {_place(name)} was replaced on the module "
            "itself, and would still call the old module after conversion. Convert first and "
            "replace it afterwards."
        )


def _refuse_compiled(
    caller: str, name: str, module: Module, applies: Callable[[Module], bool]
) -> None:
    # the module that torch.compile(module) wraps
    inner = dict(module.named_children()).get("_orig_mod")
    in_place = applies(module) and module._compiled_call_impl is not None
    if in_place or (inner is not None and applies(inner)):
        raise TypeError(
            f"{caller}: {_place(name)} is compiled, and would still call the old batch norm after "
            "conversion. Convert first and compile afterwards."
        )


def _own_behaviour(module: Module) -> tuple[list[str], list[str]]:
    """Names that the class of ``module`` or its bases define in addition to torch's own classes,
    and methods that were replaced on the module itself."""
    kind = type(module)
    of_class = {
        name
        for base in kind.__mro__
        if base not in _KNOWN and base.__module__ not in ("abc", "typing")
        for name, value in vars(base).items()
        if callable(value) or hasattr(value, "__get__")
    }
    of_module = {name for name in vars(module) if callable(getattr(kind, name, None))}
    return sorted(of_class - _HARMLESS), sorted(of_module - _HARMLESS)


def _with_own_class(module: Module) -> dict[int, tuple[str, Module]]:
    """By id, name and module of the batch norms whose class has its own behavior."""
    return {
        id(child): (name, child)
        for name, child in module.named_modules()
        if _is_plain(child) and not _is_lazy(child) and _own_behaviour(child)[0]
    }


def _warn_of_own_classes(left: dict[int, tuple[str, Module]]) -> None:
    by_class: dict[type[Module], list[str]] = {}
    for name, child in left.values():
        by_class.setdefault(type(child), []).append(name)
    for kind, names in by_class.items():
        example = next(child for _, child in left.values() if type(child) is kind)
        shown = ", ".join(f"'{name}'" for name in names[:3])
        if len(names) > 3:
            shown += f" and {len(names) - 3} more"
        place = "the module" if names == [""] else f"module{'s' * (len(names) > 1)} {shown}"
        warnings.warn(
            f"convert_syncbn_model: {place} ({kind.__module__}.{kind.__qualname__}) was not "
            "converted, and its statistics stay per rank, because its class defines "
            f"{', '.join(_own_behaviour(example)[0])}, which conversion would lose. Replace it "
            "manually, for example by a SyncBatchNorm and the rest of what the class does.",
            stacklevel=3,
        )


def _warn_of_scripted(module: Module) -> None:
    kinds = {kind.__name__ for kind in _PLAIN}
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and child.original_name in kinds:
            warnings.warn(
                f"convert_syncbn_model: {_place(name)} is a scripted {child.original_name}. It "
                "cannot be converted, and its statistics stay per rank; convert the model before "
                "torch.jit.trace (torch.jit.script does not take SyncBatchNorm).",
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
