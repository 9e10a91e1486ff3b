# SPDX-License-Identifier: BSD-3-Clause
"""Float32 master weights. Each rank of a ShardedOptimizer holds its pieces of them.

Note [Sharded master weights]
At level O2, amp replaces each low-precision parameter in the optimizer's groups by a master weight.
A ShardedMaster has the shape of the parameter, and the gradient of the whole parameter, so
unscaling, overflow checks and clipping are the same on every rank. It has no values: they read as
nan. The inner optimizer steps its ``piece``, the float32 values of this rank's share. After the
step, each rank rounds its pieces into the model's parameters, and the ranks exchange these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: The key in the optimizer's state under which master weights are saved by parameter index.
MASTER_WEIGHTS = "amp_master_weights"


def flat_like(parameter: Tensor, value: Tensor) -> Tensor:
    """The elements of `value` in the order of the memory of `parameter`; a view if possible."""
    if value.stride() != parameter.stride():
        value = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device
        ).copy_(value)
    return value.as_strided((value.numel(),), (1,), value.storage_offset())


class ShardedMaster(torch.nn.Parameter):
    """See Note [Sharded master weights].

    Args:
        parameter: the low-precision parameter.
        read: returns the known float32 values of a part of it: ``FullValue.read``.
    """

    parameter: Tensor
    read: Callable[..., Tensor]
    span: tuple[int, int]
    #: The float32 values of this rank's piece, if it has one.
    piece: Tensor | None
    made: int
    #: The value for a state dict, while that is created.
    saved: Tensor | None

    def __new__(cls, parameter: Tensor, read: Callable[..., Tensor]) -> ShardedMaster:
        values = torch.full((), float("nan"), device=parameter.device).expand(parameter.shape)
        self: Any = super().__new__(cls, values, requires_grad=True)
        self.parameter, self.read, self.piece, self.saved = parameter, read, None, None
        self.made = self._version
        return self  # type: ignore[no-any-return]

    def refuse_written(self) -> None:
        """Raise RuntimeError if the script has written to it."""
        if self._version != self.made:
            raise RuntimeError(
                "a master weight has been written, and each rank has only a piece of it: change "
                "the model's parameter before the first step, or leave out shard_master_weights."
            )

    def part(self, value: Tensor) -> Tensor:
        """This rank's piece of `value`. Pieces are returned unchanged."""
        begin, end = self.span
        if value.shape != self.parameter.shape or end - begin == self.parameter.numel():
            return value
        return flat_like(self.parameter, value)[begin:end]

    def hold(self, span: tuple[int, int]) -> Tensor:
        """Create and return ``piece``, elements `span` of the parameter."""
        self.span = span
        self.piece = torch.nn.Parameter(self.read(self.part).clone())
        return self.piece

    def follow(self) -> None:
        """Copy values that were loaded, or written to the parameter, into the piece."""
        if self.piece is not None:
            self.piece.copy_(self.read(self.part, self.piece.detach()))


def published(parameter: Tensor) -> Tensor:
    """The tensor that all ranks receive after a step: for a master weight, the model's
    parameter."""
    return parameter.parameter if isinstance(parameter, ShardedMaster) else parameter


def saved_value(master: Tensor) -> Tensor | None:
    """The value of a master weight for a state dict, None if other ranks have it."""
    return master.saved if isinstance(master, ShardedMaster) else master.detach()
