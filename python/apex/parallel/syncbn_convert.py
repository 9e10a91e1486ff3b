"""Turning the batch norms of a model into synchronized ones, and back."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from .sync_batchnorm import SyncBatchNorm
from .syncbn_group import create_syncbn_process_group

__all__ = ["convert_syncbn_model", "create_syncbn_process_group", "revert_syncbn_model"]

_PLAIN = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
    _BatchNorm,
)
# What a subclass may define and still be nothing but batch norm.
_HARMLESS = {"__init__", "extra_repr", "__repr__", "__str__", "__annotate__", "__annotate_func__"}


class _BatchNormAnyRank(_BatchNorm):
    """Plain batch norm for ``[N, C, *]`` of any rank: what a SyncBatchNorm that was not converted
    from anything is reverted to."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def convert_syncbn_model(
    module: Module, process_group: Any = None, channel_last: bool = False
) -> Module:
    """Replace every ``torch.nn.BatchNorm*d`` and ``torch.nn.SyncBatchNorm`` in ``module`` by
    :class:`SyncBatchNorm`, and return the module.

    A batch norm passed by itself is returned as a new module; any other module is changed in place.
    Parameters and buffers are the same objects as before (an optimizer keeps working), with their
    ``requires_grad``, dtype and device, and so are training flag, hooks, names and attributes that
    were set on a module. A module that is used in two places stays one module. InstanceNorm and
    everything else is left alone. Not collective: nothing is sent, and ranks may convert at
    different times.

    Args:
        module: the model.
        process_group: given to every converted module; None means all ranks, except that a
            ``torch.nn.SyncBatchNorm`` keeps the group that it has.
        channel_last: given to every converted module: the inputs are ``[N, *, C]``.

    Raises:
        TypeError: a subclass of batch norm that defines behaviour of its own, named with its place
            in the model; or a lazy one that has not seen its first input. Nothing has been changed.
    """
    _refuse_unknown(module)
    return _replace(module, {}, lambda m: _to_sync(m, process_group, channel_last))


def revert_syncbn_model(module: Module) -> Module:
    """The inverse of :func:`convert_syncbn_model`: plain batch norms again.

    A converted module gets back the class it was converted from; one that was built as a
    SyncBatchNorm becomes a batch norm that takes ``[N, C, *]`` of any rank.

    Raises:
        ValueError: a module fuses a ReLU, or was built with ``channel_last``: plain batch norm has
            neither. Nothing has been changed.
    """
    for name, child in module.named_modules():
        if isinstance(child, SyncBatchNorm):
            if child.fuse_relu:
                raise ValueError(
                    f"revert_syncbn_model: {_place(name)} fuses a ReLU, which plain batch norm "
                    "cannot; set fuse_relu=False and add the ReLU to the model."
                )
            if child.channel_last and "_converted_from" not in child.__dict__:
                raise ValueError(
                    f"revert_syncbn_model: {_place(name)} takes [N, *, C] input "
                    "(channel_last=True), which plain batch norm does not; convert that part of "
                    "the model by hand."
                )
    return _replace(module, {}, _to_plain)


def _place(name: str) -> str:
    return f"module '{name}'" if name else "the module"


def _refuse_unknown(module: Module) -> None:
    for name, child in module.named_modules():
        if not isinstance(child, _BatchNorm) or isinstance(child, SyncBatchNorm):
            continue
        kind = type(child)
        if isinstance(child, torch.nn.modules.lazy.LazyModuleMixin):
            raise TypeError(
                f"convert_syncbn_model: {_place(name)} is a {kind.__name__} that does not know its "
                "number of channels yet; run one batch through the model first."
            )
        own = _own_behaviour(kind)
        if own:
            raise TypeError(
                f"convert_syncbn_model: {_place(name)} is a {kind.__module__}.{kind.__qualname__}, "
                f"which defines {', '.join(own)}; converting it would lose that. Replace it by "
                "hand, or by a plain torch.nn.BatchNorm."
            )


def _own_behaviour(kind: type) -> list[str]:
    """Names that ``kind`` and its bases define on top of torch's own classes."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base in _PLAIN or base in _BatchNormAnyRank.__mro__:
            break
        for name, value in vars(base).items():
            if name not in _HARMLESS and (callable(value) or hasattr(value, "__get__")):
                found.add(name)
    return sorted(found - {"__dict__", "__weakref__"})


def _replace(module: Module, done: dict[int, tuple[Module, Module]], make: Any) -> Module:
    if id(module) in done:
        return done[id(module)][1]
    result = make(module)
    done[id(module)] = (module, result)  # the original stays alive, so that its id stays its own
    if result is module:
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _replace(child, done, make)
    return result


def _transplant(source: Module, kind: type[Module]) -> Module:
    """A module of class ``kind`` with everything ``source`` has: the same parameters, buffers,
    hooks (their handles still remove them) and attributes."""
    result = kind.__new__(kind)
    state = source.__dict__.copy()
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        state[name] = state[name].copy()
    result.__dict__.update(state)
    for hook in result._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):  # such a hook holds its module weakly
            hook.module = weakref.ref(result)
    return result


def _to_sync(module: Module, process_group: Any, channel_last: bool) -> Module:
    if isinstance(module, SyncBatchNorm):
        if process_group is not None:
            module.process_group = process_group
        module.channel_last = module.channel_last or channel_last
        return module
    if not isinstance(module, _BatchNorm):
        return module
    result = _transplant(module, SyncBatchNorm)
    own_group = result.__dict__.pop("process_group", None)
    result.process_group = process_group if process_group is not None else own_group
    result.channel_last = channel_last
    result.fuse_relu = False
    result._converted_from = type(module)
    return result


def _to_plain(module: Module) -> Module:
    if not isinstance(module, SyncBatchNorm):
        return module
    kind = module.__dict__.get("_converted_from", _BatchNormAnyRank)
    result = _transplant(module, kind)
    for name in (
        "_process_group",
        "_process_group_name",
        "_converted_from",
        "channel_last",
        "fuse_relu",
    ):
        result.__dict__.pop(name, None)
    if issubclass(kind, torch.nn.SyncBatchNorm):
        result.process_group = module.process_group
    return result
