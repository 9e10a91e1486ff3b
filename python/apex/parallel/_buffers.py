# SPDX-License-Identifier: BSD-3-Clause
"""``broadcast_buffers``: broadcasts one rank's buffers to all ranks."""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.distributed as dist
from torch import nn

from apex import _core
from apex._internal.group_names import name_of

# Note [Buffers that change]
#
# A module may register buffers later, or assign buffers of another shape or dtype. If all ranks do,
# they all compare their buffers again before the broadcast. If only some do, those compare while
# the others are in the next collective. The engine finds ranks that are in different collectives,
# and all of them raise. On devices other than the CPU these ranks wait for each other.

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def described(module: nn.Module, ignored: Container[str] = ()) -> list[str]:
    """Descriptions of the buffers, which must be equal on all ranks for collectives to match."""
    return [
        f"buffer '{name}' ({i})={buffer.dtype} {list(buffer.shape)}{_kind(buffer)}"
        for i, (name, buffer) in enumerate(module.named_buffers())
        if name not in ignored
    ]


def _kind(buffer: torch.Tensor) -> str:
    """The properties that determine how a buffer can be sent; empty for a plain tensor."""
    if buffer.is_meta:
        return " on meta"
    if buffer.layout != torch.strided:
        return f" {buffer.layout}"
    if type(buffer) in _PLAIN:
        freed = buffer.numel() > 0 and not buffer.untyped_storage().size()
        return " without memory" if freed else " quantized" if buffer.is_quantized else ""
    return f" {type(buffer).__name__}"


def _has_memory(buffer: torch.Tensor) -> bool:
    """False for a wrapper subclass, which holds other tensors and is not synchronized."""
    return type(buffer) in _PLAIN or buffer.data_ptr() != 0


def check(module: nn.Module, group: dist.ProcessGroup, ignored: Container[str]) -> None:
    """Raise ValueError for a buffer that cannot be sent, after the ranks have compared theirs."""
    named = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
    _core.require_sendable(list(named), list(named.values()), "buffer", name_of(group))


def _layout(tensors: list[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


class Buffers:
    """The buffers of a module, as they were when all ranks compared theirs."""

    def __init__(self, module: nn.Module, ignored: Container[str] = ()) -> None:
        self._module = module
        self._ignored = ignored
        self._layout = _layout(synchronized(module, ignored))

    def take(self, group: dist.ProcessGroup, root: int) -> None:
        """Overwrite all buffers with those of rank ``root``.

        Collective. On a CPU backend, blocks the host.

        Raises:
            RuntimeError: if buffers were changed in different ways.
        """
        tensors = synchronized(self._module, self._ignored)
        if _layout(tensors) != self._layout:  # see Note [Buffers that change]
            descriptions = described(self._module, self._ignored)
            try:
                _core.verify_same_model([], [], descriptions, name_of(group))
            except RuntimeError as error:
                raise RuntimeError(
                    f"buffers of rank {group.rank()} have changed since the ranks compared theirs: "
                    "make such changes on every rank before the same forward, and restart with a "
                    f"new process group. {error}"
                ) from None
            check(self._module, group, self._ignored)
            self._layout = _layout(tensors)
        if tensors:
            names = [name for name, _ in self._module.named_buffers()]
            span = "' to '".join(dict.fromkeys([names[0], names[-1]]))
        else:
            # So that a rank that registers its first buffer finds no other rank in the next
            # collective.
            span = "none"
            parameter = next(self._module.parameters(), torch.empty(0, device="cpu"))
            tensors = [torch.zeros(1, device=parameter.device)]
        what = f"broadcast of buffers ('{span}')"
        _core.broadcast_coalesced(tensors, name_of(group), root, what)


def synchronized(module: nn.Module, ignored: Container[str] = ()) -> list[torch.Tensor]:
    """All buffers with memory, except those in ``ignored``, in the same order on every rank.

    Batch norm's running statistics are returned as ``.data``. Writing to them then does not
    invalidate tensors saved for a pending backward. Batch norm's own update does not either,
    because backward in training reads the batch statistics. Other buffers count their changes, so a
    backward that would read a changed value raises an error.
    """
    named = module.named_buffers() if ignored else ()
    left_out = {id(buffer) for name, buffer in named if name in ignored}
    buffers: dict[int, torch.Tensor] = {}
    for part in module.modules():
        kind = getattr(part, "original_name", "")  # set for a scripted module
        own = isinstance(part, nn.modules.batchnorm._NormBase) or "Norm" in kind
        for buffer in part._buffers.values():
            if buffer is None or id(buffer) in buffers or id(buffer) in left_out:
                continue
            buffers[id(buffer)] = buffer.data if own else buffer
    return [buffer for buffer in buffers.values() if _has_memory(buffer)]
