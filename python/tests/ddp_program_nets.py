# SPDX-License-Identifier: BSD-3-Clause
"""Models of the random programs: small blocks with varied gradients, some of which share memory.

A net runs on one rank. For the reference, all ranks' copies run in lockstep, block by block, so
that batch norm sees the batch of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ddp_support import wide
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex.parallel import convert_syncbn_model

WIDTH = 4
BIG = 4096  # a [WIDTH, BIG] parameter has 64 KiB and is reduced in place

# Gradients of these blocks share memory with each other, or with one that backward still reads.
ALIASING = ("pos", "two", "expand", "chunk", "cat")
SHARING = (*ALIASING, "large")
LAYOUTS = ("transposed", "gaps", "empty")
# Blocks that "linear:bfloat16" and the like may name.
WITH_DTYPES = ("linear", "scale", "embedding", "transposed", "empty")
NARROW = (torch.float16, torch.bfloat16)


class Boom(RuntimeError):
    """The exception that a program raises deliberately."""


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise Boom("raised on purpose, in backward")


class Quantized(Tensor):
    """Integers and their scale, as in quantized base weights. It has no memory of its own."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Quantized:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=scale.dtype, device=codes.device
        )
        return made

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @staticmethod
    def of(values: Tensor) -> Quantized:
        scale = values.abs().amax(1, keepdim=True) / 127
        return Quantized((values / scale).round().to(torch.int8), scale)

    @staticmethod
    def of_rank(rank: int) -> nn.Parameter:
        """Another one on each rank. The wrapper must leave it alone."""
        values = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(rank))
        return nn.Parameter(Quantized.of(values), requires_grad=False)

    def value(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Quantized({self.value()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Quantized(args[0].codes, args[0].scale)
        return func(*[arg.value() if isinstance(arg, Quantized) else arg for arg in args])


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def plain_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a program may train, freeze and convert."""
    return [p for p in module.parameters() if not isinstance(p, Quantized)]


class Block(nn.Module):
    """A block with input and output [WIDTH, WIDTH]. ``spec`` is a kind, or ``kind:dtype``."""

    def __init__(self, spec: str) -> None:
        super().__init__()
        self.spec = spec
        kind, _, dtype = spec.partition(":")
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
        elif kind == "transposed":
            self.a = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        elif kind == "gaps":
            self.a = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        elif kind == "empty":
            self.none, self.a = _parameter(0, 3), _parameter(WIDTH)
        elif kind == "complex":
            self.a = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        elif kind == "adapter":
            self.base = Quantized.of_rank(dist.get_rank())
            self.a, self.b = _parameter(WIDTH, 2), _parameter(2, WIDTH)
        elif kind == "buffer":
            self.a = _parameter(WIDTH)
            self.register_buffer("factor", torch.rand(WIDTH) + 0.5)
        elif kind == "syncbn":
            self.inner = convert_syncbn_model(nn.BatchNorm1d(WIDTH))
        else:
            raise ValueError(kind)
        for parameter in plain_parameters(self) if dtype else []:
            parameter.data = parameter.data.to(getattr(torch, dtype))  # keeps its strides

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        h = h.to(plain_parameters(self)[0].dtype)
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
        if kind in ("transposed", "gaps"):
            return torch.tanh(h @ self.a) + 0.5 * h
        if kind == "empty":
            return h + self.none.sum() + self.a
        if kind == "complex":
            return torch.tanh((h @ self.a).real) + 0.5 * h.real
        if kind == "adapter":
            frozen = h @ self.base.value().t().to(h.dtype)
            return torch.tanh(frozen + h @ self.a @ self.b) + 0.5 * h
        if kind == "buffer":
            return h * self.factor.to(h.dtype) + self.a
        return self.inner(h)

    def normalize_together(self, h: Tensor, everyone: list[Tensor]) -> Tensor:
        """Batch norm of this rank's slice, with the statistics of all ranks."""
        batch = torch.cat(everyone).double()
        mean, var = batch.mean(0), batch.var(0, unbiased=False)
        normal = (h.double() - mean) / torch.sqrt(var + self.inner.eps)
        return normal * self.inner.weight + self.inner.bias


class Outputs(NamedTuple):
    last: Tensor
    middle: Tensor  # of the block in the middle


class Net(nn.Module):
    """Blocks in a row. ``again`` uses the block before it once more."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for kind in kinds:
            again = kind == "again" and len(self.blocks) > 0
            self.blocks.append(
                self.blocks[-1] if again else Block("scale" if kind == "again" else kind)
            )

    def has(self, *kinds: str) -> bool:
        return any(block.kind in kinds for block in self.blocks)

    def reuses(self) -> bool:
        return len({id(block) for block in self.blocks}) < len(self.blocks)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        skip: Sequence[int] = (),
        checkpointed: str | None = None,
        raise_at: int | None = None,
        fail_at: int | None = None,
    ) -> Outputs:
        """Skip the blocks in ``skip``. Raise in the backward that reaches ``raise_at``, or in this
        forward at ``fail_at``. ``checkpointed`` is reentrant or non-reentrant, of each block; or,
        with ``:`` and a number, of segments of that many blocks, in which each block is one too."""

        def run(first: int, end: int, h: Tensor, nested: bool) -> tuple[Tensor, Tensor]:
            middle = h
            for i in range(first, end):
                block = self.blocks[i]
                if i == fail_at:
                    raise Boom("raised on purpose, in forward")
                if i == raise_at:
                    h = RaiseInBackward.apply(h)
                if i not in skip:
                    h = (
                        checkpoint(block, h, ids, use_reentrant=reentrant)
                        if nested
                        else block(h, ids)
                    )
                if i <= len(self.blocks) // 2:
                    middle = h
            return h, middle

        kind, _, size = (checkpointed or "").partition(":")
        reentrant, count = kind == "reentrant", len(self.blocks)
        h = middle = x * 1.0
        if not size:
            return Outputs(*run(0, count, h, bool(kind)))
        for first in range(0, count, int(size)):
            end = min(first + int(size), count)
            h, m = checkpoint(run, first, end, h, not reentrant, use_reentrant=reentrant)
            middle = m if first <= count // 2 else middle
        return Outputs(h, middle)


def reference_of(models: nn.ModuleList, rank: int, narrow: bool) -> nn.ModuleList:
    """A copy for one rank in float64. If a parameter is ``narrow``, in its own dtypes, so that
    the averaging is compared and not the rounding of blocks."""
    reference = copy.deepcopy(models)
    for block in (block for net in reference for block in net.blocks):
        if block.kind == "adapter":
            block.base = Quantized.of_rank(rank)
    for tensor in [] if narrow else [*plain_parameters(reference), *reference.buffers()]:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(wide(tensor.dtype))
    reference.zero_grad()
    return reference


def in_lockstep(
    nets: list[Net], inputs: list[Tensor], ids: list[Tensor], skips: list[Sequence[int]]
) -> list[Outputs]:
    """The outputs of every rank's net."""
    hs = middle = [x * 1.0 for x in inputs]
    for i in range(len(nets[0].blocks)):
        blocks = [net.blocks[i] for net in nets]
        if blocks[0].kind == "syncbn":
            hs = [block.normalize_together(h, hs) for block, h in zip(blocks, hs, strict=True)]
        else:
            hs = [
                h if i in skip else block(h, own)
                for block, h, own, skip in zip(blocks, hs, ids, skips, strict=True)
            ]
        if i == len(nets[0].blocks) // 2:
            middle = hs
    return [Outputs(h, m) for h, m in zip(hs, middle, strict=True)]
