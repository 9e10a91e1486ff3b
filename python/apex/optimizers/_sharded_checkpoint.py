# SPDX-License-Identifier: BSD-3-Clause
"""The state of a ShardedOptimizer in the format of torch.distributed.checkpoint (DCP).

Note [Pieces as boxes]
A piece is a run of a parameter's elements in memory order. DCP stores chunks of a tensor as boxes,
with an offset and a size in each dimension. A run consists of the end of a row, whole rows, and the
beginning of a row; in more dimensions, the two partial rows are split in the same way. So a piece
is at most 2 n - 1 boxes of a tensor with n dimensions, and each box is a view of the piece. The
saved tensors have the names and shapes of the plain optimizer's state. The plain optimizer, and a
ShardedOptimizer of any number of ranks, load them as DCP loads any tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ._state import require_shape

Box = tuple[list[int], list[int]]


def boxes_of(sizes: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The offsets and sizes of boxes that cover elements [begin, end) of a row-major tensor.

    They are not empty, and in the order of the elements.
    """
    if end - begin == math.prod(sizes):
        yield [0] * len(sizes), list(sizes)
        return
    row = math.prod(sizes[1:])
    first, last = -(-begin // row), end // row  # whole rows, if any

    def within(at: int, begin: int, end: int) -> Iterator[Box]:
        for offsets, inner in boxes_of(sizes[1:], begin, end):
            yield [at, *offsets], [1, *inner]

    if first > last:
        yield from within(last, begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from within(first - 1, begin - (first - 1) * row, row)
    if first < last:
        yield [first] + [0] * (len(sizes) - 1), [last - first, *sizes[1:]]
    if last * row < end:
        yield from within(last, 0, end - last * row)


class TensorPiece(Tensor):
    """A tensor that this rank has a piece of: Note [Pieces as boxes].

    It implements torch's ``_Checkpointable``, and no operation except those of asynchronous saves.

    Args:
        like: a tensor of the same shape and memory format.
        begin: the position of the piece in the memory of `like`.
        flat: the elements of the piece.
    """

    flat: Tensor
    chunks: list[tuple[torch.Size, Tensor]]

    @staticmethod
    def __new__(cls, like: Tensor, begin: int, flat: Tensor) -> TensorPiece:
        self: TensorPiece = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=flat.dtype, device=flat.device
        )
        order = sorted(range(like.ndim), key=like.stride, reverse=True)
        back = [order.index(d) for d in range(like.ndim)]
        self.flat, self.chunks = flat, []
        done = 0
        for offsets, sizes in boxes_of([like.shape[d] for d in order], begin, begin + flat.numel()):
            part = flat[done : done + math.prod(sizes)]
            done += part.numel()
            self.chunks.append(
                (torch.Size(offsets[i] for i in back), part.view(sizes).permute(back))
            )
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default:  # a stager copies the attributes to it
            return Tensor._make_wrapper_subclass(
                cls, args[0].shape, dtype=args[0].dtype, device=(kwargs or {}).get("device")
            )
        raise TypeError(f"{func} of a piece of a tensor, of which each rank has others.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TensorPiece({self.flat.numel()} of {tuple(self.shape)})"

    def _chunk(self, offsets: torch.Size, part: Tensor) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=offsets, sizes=part.size())

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk(offsets, part),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for offsets, part in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(*chunk) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(part for offsets, part in self.chunks if offsets == index.offset)


#: A parameter and the span of its elements that this rank steps.
Part = tuple[Tensor, int, int]
#: For the path of an entry: whether to read it, or the part of it to read.
Wanted = Callable[[tuple[Any, ...]], "bool | Part | None"]


def _target(path: tuple[Any, ...], entry: TensorStorageMetadata, part: bool | Part) -> Tensor:
    """A new tensor that an entry, or a part of it, is read into."""
    dtype = entry.properties.dtype
    if isinstance(part, bool) or not entry.size:
        return torch.empty(entry.size, dtype=dtype, device="cpu")
    parameter, begin, end = part
    if end - begin < parameter.numel():
        require_shape(parameter, path[-1], entry.size, path[1])
        flat = torch.empty(end - begin, dtype=dtype, device=parameter.device)
        return TensorPiece(parameter, begin, flat)
    if entry.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype, device=parameter.device)


class _Planner(dcp.DefaultLoadPlanner):
    """Reads the wanted entries of one name. The checkpoint determines which entries exist."""

    def __init__(self, name: str, wanted: Wanted) -> None:
        super().__init__()
        self.name = name
        self.wanted = wanted
        self.loaded: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Called by DCP. If it raises on one rank, all ranks raise."""
        assert metadata is not None
        paths = metadata.planner_data or {}
        names = sorted({str(path[0]) for path in paths.values()})
        if self.name not in names:
            raise ValueError(
                f"the checkpoint has nothing named {self.name!r}, but {', '.join(names)}."
            )
        found: dict[str, Any] = {}
        for fqn, path in paths.items():
            if path[0] == self.name and (part := self.wanted(path[1:])):
                found[fqn] = None
                entry = metadata.state_dict_metadata[fqn]
                if isinstance(entry, TensorStorageMetadata):
                    found[fqn] = _target(path[1:], entry, part)
        state_dict.update(unflatten_state_dict(found, paths))
        self.loaded = state_dict
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _as_saved(value: Any) -> Any:
    """Pieces as flat tensors, and integers as keys, which DCP has saved as text."""
    if isinstance(value, dict):
        return {int(k) if k.isdecimal() else k: _as_saved(v) for k, v in value.items()}
    return value.flat if isinstance(value, TensorPiece) else value


def load_entries(
    checkpoint: str | os.PathLike[str] | dcp.StorageReader,
    name: str,
    group: dist.ProcessGroup,
    wanted: Wanted,
) -> dict[Any, Any]:
    """The entries under `name` that are `wanted`, by their paths below it. Collective."""
    planner = _Planner(name, wanted)
    options: dict[str, Any] = {"checkpoint_id": checkpoint}
    if isinstance(checkpoint, dcp.StorageReader):
        options = {"storage_reader": checkpoint}
    dcp.load({}, planner=planner, process_group=group, **options)
    loaded: dict[Any, Any] = _as_saved(planner.loaded.get(name, {}))
    return loaded
