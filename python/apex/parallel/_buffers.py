# SPDX-License-Identifier: BSD-3-Clause
"""``broadcast_buffers``: broadcasts one rank's buffers to all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Container

import torch
import torch.distributed as dist
from torch import nn

from apex import _core
from apex._internal.group_names import name_of

# Note [Buffers that change]
#
# A module may register buffers later, or assign buffers of another shape or dtype. If all ranks do,
# no message is needed. If only one rank does, the message sizes of the ranks differ, and the
# broadcast never ends. So the broadcast has the size that the ranks agreed on when they compared
# their models. It begins with a fingerprint of the sender's current buffers and their size in
# bytes. A rank whose own buffers have changed sends or receives a placeholder of that size. If the
# sender's buffers have changed, they follow in a second broadcast. So every rank can compare its
# buffers with the sender's. A rank whose buffers differ raises and releases its engine's
# connections, which ends backward on the other ranks. On devices other than the CPU, nothing is
# compared, because the host would have to wait for the broadcast.


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class BuffersDiffer(RuntimeError):
    """This rank's buffers differ from the buffers that were broadcast."""


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


def _fingerprint(description: list[str]) -> int:
    return zlib.crc32("\n".join(description).encode())


def _layout(tensors: list[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


class Buffers:
    """The buffers of a module, as they were when all ranks compared theirs."""

    def __init__(self, module: nn.Module, ignored: Container[str] = ()) -> None:
        self._module = module
        self._ignored = ignored
        self._agree(synchronized(module, ignored))

    def _agree(self, tensors: list[torch.Tensor]) -> None:
        self._description = described(self._module, self._ignored)
        self._fingerprint = _fingerprint(self._description)
        self._layout = _layout(tensors)
        names = [name for name, _ in self._module.named_buffers()]
        span = "' to '".join(dict.fromkeys([names[0], names[-1]])) if names else ""
        self._what = f"broadcast of buffers ('{span}')" if names else "broadcast of buffers"

    def take(self, group: dist.ProcessGroup, root: int) -> None:
        """Overwrite all buffers with those of rank ``root``.

        Collective. On a CPU backend, blocks the host.

        Raises:
            BuffersDiffer: if this rank's buffers differ from rank ``root``'s.
        """
        tensors = synchronized(self._module, self._ignored)
        if not self._layout or any(not tensor.is_cpu for tensor in tensors):
            if tensors:
                _core.broadcast_coalesced(tensors, name_of(group), root, self._what)
            return
        changed = _layout(tensors) != self._layout
        mine = (
            _fingerprint(described(self._module, self._ignored)) if changed else self._fingerprint
        )
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        header = torch.tensor([mine, size], device="cpu")
        first = tensors
        if changed:
            first = [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in self._layout]
        message = [header, *first]
        _core.broadcast_coalesced(message, name_of(group), root, self._what)
        sent, sent_size = header.tolist()
        if sent != self._fingerprint:
            second = tensors
            if sent == mine:
                check(self._module, group, self._ignored)
            else:
                second = [torch.empty(sent_size, dtype=torch.uint8, device="cpu")]
            _core.broadcast_coalesced(second, name_of(group), root, self._what)
        if sent != mine:
            raise BuffersDiffer(self._difference(group.rank(), root))
        if changed:
            self._agree(tensors)

    def _difference(self, rank: int, root: int) -> str:
        now = described(self._module, self._ignored)
        lost = [line for line in self._description if line not in now]
        new = [line for line in now if line not in self._description]
        changes = [f"{line} was removed" for line in lost] + [f"{line} was added" for line in new]
        there = "no such change" if changes else "they have changed"
        return (
            f"rank {rank}'s buffers differ from rank {root}'s, which broadcast_buffers copies. "
            f"Since the ranks last compared their buffers, on rank {rank}: "
            f"{', '.join(changes) or 'nothing has changed'}; on rank {root}: {there}. Make such "
            "changes on every rank before the same forward, and construct the wrapper again."
        )


def synchronized(module: nn.Module, ignored: Container[str] = ()) -> list[torch.Tensor]:
    """All buffers with memory, except those in ``ignored``, in the same order on every rank.

    Batch norm's running statistics are returned as ``.data``. Writing to them then does not
    invalidate tensors saved for a pending backward. Batch norm's own update does not either,
    because backward in training reads the batch statistics. Other buffers count their changes, so a
    backward that would read a changed value raises an error.
    """
    left_out: set[int] = set()
    if ignored:
        left_out = {id(buffer) for name, buffer in module.named_buffers() if name in ignored}
    buffers: dict[int, torch.Tensor] = {}
    for part in module.modules():
        kind = getattr(part, "original_name", "")  # set for a scripted module
        own = isinstance(part, nn.modules.batchnorm._NormBase) or "Norm" in kind
        for buffer in part._buffers.values():
            if buffer is None or id(buffer) in buffers or id(buffer) in left_out:
                continue
            buffers[id(buffer)] = buffer.data if own else buffer
    return [buffer for buffer in buffers.values() if _has_memory(buffer)]
