# SPDX-License-Identifier: BSD-3-Clause
"""Models of the random programs: small blocks with varied gradients, some of which share memory.

A net runs on one rank. For the reference, all ranks' copies run in lockstep, block by block, so
that batch norm sees the batch of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex.parallel import convert_syncbn_model

WIDTH = 4
BIG = 4096  # a [WIDTH, BIG] parameter has 64 KiB and is reduced in place

# Gradients of these blocks share memory with each other, or with one that backward still reads.
ALIASING = ("pos", "two", "expand", "chunk", "cat")
SHARING = (*ALIASING, "large")


class Boom(RuntimeError):
    """The exception that a program raises deliberately."""


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise Boom("raised on purpose, in backward")


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Block(nn.Module):
    """A block with input and output [WIDTH, WIDTH]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.inner = nn.Linear(WIDTH, WIDTH)
        elif kind == "conv":
            self.inner = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        elif kind in ("embedding", "sparse"):
            self.table = nn.Embedding(5, WIDTH, sparse=kind == "sparse")
        elif kind == "scale":
            self.a = _parameter()
        elif kind in ("pos", "expand"):
            self.a = _parameter(WIDTH, WIDTH)
        elif kind == "two":
            self.a, self.b = _parameter(WIDTH, WIDTH), _parameter(WIDTH, WIDTH)
        elif kind == "chunk":
            self.a = _parameter(2 * WIDTH, WIDTH)
        elif kind == "cat":
            self.a, self.b = _parameter(WIDTH // 2, WIDTH), _parameter(WIDTH // 2, WIDTH)
        elif kind == "large":
            self.a, self.b = _parameter(WIDTH, BIG), _parameter(WIDTH, BIG)
            self.c = _parameter(WIDTH, BIG)
        elif kind == "syncbn":
            self.inner = convert_syncbn_model(nn.BatchNorm1d(WIDTH))
        else:
            raise ValueError(kind)

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        h = h.to(next(self.parameters()).dtype)
        kind = self.kind
        if kind == "linear":
            return torch.tanh(self.inner(h)) + 0.5 * h
        if kind == "conv":
            return torch.tanh(self.inner(h.view(1, WIDTH, 2, 2))).reshape(WIDTH, WIDTH) + 0.5 * h
        if kind in ("embedding", "sparse"):
            return h + self.table(ids)
        if kind == "scale":
            return h * self.a
        if kind == "pos":
            return (h.unsqueeze(0) + self.a.unsqueeze(0)).squeeze(0)
        if kind == "expand":
            return h + self.a.expand(1, WIDTH, WIDTH)[0]
        if kind == "two":
            return h + (self.a + self.b)
        if kind == "chunk":
            first, second = self.a.chunk(2)
            return h + first - second
        if kind == "cat":
            return h + torch.cat([self.a, self.b])
        if kind == "large":
            wide = (h @ self.a).unsqueeze(0) + self.b.unsqueeze(0) + self.c
            return torch.tanh(wide).view(WIDTH, WIDTH, -1).mean(-1) + 0.5 * h
        return self.inner(h)

    def normalize_together(self, h: Tensor, everyone: list[Tensor]) -> Tensor:
        """Batch norm of this rank's slice, with the statistics of all ranks."""
        batch = torch.cat(everyone).double()
        mean, var = batch.mean(0), batch.var(0, unbiased=False)
        normal = (h.double() - mean) / torch.sqrt(var + self.inner.eps)
        return normal * self.inner.weight + self.inner.bias


class Net(nn.Module):
    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        skip: Sequence[int] = (),
        checkpointed: str | None = None,
        raise_at: int | None = None,
        fail_at: int | None = None,
    ) -> Tensor:
        """Skip the blocks in ``skip``. Raise in the backward that reaches ``raise_at``, or in this
        forward at ``fail_at``."""
        h = x * 1.0
        for i, block in enumerate(self.blocks):
            if i == fail_at:
                raise Boom("raised on purpose, in forward")
            if i == raise_at:
                h = RaiseInBackward.apply(h)
            if i in skip:
                continue
            if checkpointed is None:
                h = block(h, ids)
            else:
                h = checkpoint(block, h, ids, use_reentrant=checkpointed == "reentrant")
        return h


def in_lockstep(
    nets: list[Net], inputs: list[Tensor], ids: list[Tensor], skips: list[Sequence[int]]
) -> list[Tensor]:
    """The outputs of every rank's net."""
    hs = [x * 1.0 for x in inputs]
    for i in range(len(nets[0].blocks)):
        blocks = [net.blocks[i] for net in nets]
        if blocks[0].kind == "syncbn":
            hs = [block.normalize_together(h, hs) for block, h in zip(blocks, hs, strict=True)]
            continue
        hs = [
            h if i in skip else block(h, own)
            for block, h, own, skip in zip(blocks, hs, ids, skips, strict=True)
        ]
    return hs
