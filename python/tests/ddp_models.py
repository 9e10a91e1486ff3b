# SPDX-License-Identifier: BSD-3-Clause
"""Small models with varied gradients: sharing, layouts, dtypes, sparsity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 9)
        self.b = nn.Linear(9, 7)
        self.c = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.a.weight.dtype)
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Cnn(nn.Module):
    """Channels-last weights and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.second = nn.Conv2d(5, 4, 3, stride=2)
        self.head = nn.Linear(4 * 3 * 3, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype).contiguous(memory_format=torch.channels_last)
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))).flatten(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.to(self.head.weight.dtype))[0])


class SharedEmbedding(nn.Module):
    """One table that is used for both inputs and for the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.table.weight

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.mix(self.table(left)) + self.table(right)))


class Tied(nn.Module):
    """A layer that is used three times, and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.layer.weight.dtype)
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.out(x @ self.layer.weight)


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 5, sparse=True)
        self.out = nn.Linear(5, 2)

    def forward(self, indices: Tensor, other: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(indices)).mean(1))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))
        self.gate = nn.Parameter(torch.randn(4))
        self.conjugated = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.weight.dtype) @ self.weight
        return torch.cat([(y * self.gate).abs(), (y * self.conjugated.conj()).imag], -1)


class Mixed(nn.Module):
    """Layers of four dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.wide = nn.Linear(5, 5).double()
        self.narrow = nn.Linear(5, 5).bfloat16()
        self.narrowest = nn.Linear(5, 5).half()
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.wide, self.narrow, self.narrowest, self.last):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


class Odd(nn.Module):
    """Parameters without elements, without dimensions, transposed, and with gaps in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.late_empty = nn.Parameter(torch.zeros(5, 0))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x.to(self.scale.dtype) @ self.transposed) * self.scale
        return y @ self.gaps + self.empty.sum() + self.late_empty.sum()


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    dtype: torch.dtype | None = None  # the dtype to convert to after building

    def make(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.build()
        return model if self.dtype is None else model.to(self.dtype)


def _features(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda g: (torch.randn(BATCH, *shape, generator=g),)


def _tokens(limit: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda g: tuple(torch.randint(limit, (BATCH, 4), generator=g) for _ in range(2))


MODELS = {
    "mlp": Model(Mlp, _features(6)),
    "mlp_float64": Model(Mlp, _features(6), torch.float64),
    "mlp_bfloat16": Model(Mlp, _features(6), torch.bfloat16),
    "mlp_float16": Model(Mlp, _features(6), torch.float16),
    "cnn_channels_last": Model(Cnn, _features(3, 8, 8)),
    "lstm": Model(Lstm, _features(7, 4)),
    "shared_embedding": Model(SharedEmbedding, _tokens(11)),
    "tied": Model(Tied, _features(6)),
    "sparse_embedding": Model(SparseEmbedding, _tokens(13)),
    "complex": Model(Complex, _features(5)),
    "mixed_dtypes": Model(Mixed, _features(6)),
    "odd_parameters": Model(Odd, _features(6)),
}


def batch(model: Model, rank: int, step: int = 0) -> tuple[Tensor, ...]:
    """The inputs of one rank in one step, equal for all callers."""
    return model.inputs(torch.Generator().manual_seed(1000 * step + rank))


def loss_of(output: Tensor) -> Tensor:
    """A mean over the batch, so that the mean over ranks is the mean over the whole batch."""
    return F.mse_loss(output, torch.full_like(output, 0.3))


def whole_batch(model: Model, world: int, step: int = 0) -> tuple[Tensor, ...]:
    """The batches of all ranks, concatenated."""
    parts: list[Any] = [batch(model, rank, step) for rank in range(world)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


class Branches(nn.Module):
    """Three layers. The arguments of a forward select the layers that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x)) + x
        return x


def data(rank: int, step: int = 0, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape or (3, 4), generator=generator)


def build(module: Callable[[], nn.Module] = Branches, seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return module()
