# SPDX-License-Identifier: BSD-3-Clause
"""Modules and Trainers of Lightning, for ranks that the test's process has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from clients_support import load
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, BATCH, RATE = 24, 4, 0.05


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()


def loader(
    rank: int = 0, world: int = 1, batch: int = BATCH, dtype: torch.dtype = torch.float64
) -> DataLoader[Any]:
    """Samples are interleaved over ranks: a step of all ranks has `world * batch` consecutive
    ones."""
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(7), dtype=dtype)
    samples = TensorDataset(x, x.sum(1, keepdim=True).sin())
    sampler: Any = DistributedSampler(samples, world, rank, shuffle=False)
    return DataLoader(samples, batch_size=batch, sampler=sampler)


def regression(net: nn.Module) -> Any:
    """A LightningModule that records its wrapper and the results of validation."""
    lightning = load("lightning.pytorch")

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.wrappers: list[Any] = []
            self.kinds: set[str] = set()
            self.validated: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            self.wrappers.append(self.trainer.strategy.model)
            self.kinds |= {type(layer).__module__ for layer in self.net}
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.validated.append(nn.functional.mse_loss(self.net(x), y).item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)

    return Regression()


def weighted_regression() -> Any:
    """The recipe of docs/howto/lightning.md in float64. `losses` has the loss of each step."""
    lightning = load("lightning.pytorch")

    class Weighted(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
            self.summed: Any = 0.0
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            self.items = len(x)
            loss = (self.net(x) - y).square().sum()
            self.summed += loss.detach()
            return loss

        def backward(self, loss: Tensor) -> None:
            with self.trainer.strategy.model.weight(self.items):
                (loss * self.trainer.accumulate_grad_batches).backward()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.losses.append(self.trainer.strategy.model.weighted_mean(self.summed).item())
            self.summed = 0.0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)

    return Weighted()


def unequal_loader(rank: int, world: int) -> DataLoader[Any]:
    """Four batches with six samples in total. Every rank except the first gets one of the
    batches."""
    samples = loader(dtype=torch.float64).dataset
    batches = []
    for begin in range(0, SAMPLES, 6):
        first = 6 - (world - 1)
        share = range(first) if rank == 0 else range(first + rank - 1, first + rank)
        batches.append([begin + index for index in share])
    return DataLoader(samples, batch_sampler=batches)


@contextlib.contextmanager
def launched_by_torchrun(rank: int, world: int) -> Iterator[None]:
    """Make Lightning treat this process as a rank that torchrun has started."""
    values = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    assert not values.keys() & os.environ.keys()
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


@contextlib.contextmanager
def trainer(rank: int, world: int, strategy: Any = "apex", **options: Any) -> Iterator[Any]:
    """A Trainer that writes nothing. It is valid within the block."""
    lightning = load("lightning.pytorch")
    load("apex.parallel.integrations.lightning")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    common = {"accelerator": "cpu", "devices": world, "strategy": strategy, "max_epochs": 2}
    # Lightning's own sampler would shuffle.
    kept = {"enable_checkpointing": False, "use_distributed_sampler": False}
    with launched_by_torchrun(rank, world):
        yield lightning.Trainer(**{**quiet, **kept, **common, **options})


def plain(world: int, batches: int = 1, epochs: int = 2, sync: bool = False) -> nn.Module:
    """The reference: one process without Lightning, on the batches of all ranks.

    Without `sync`, each rank's slice is normalized separately, and running statistics are rank 0's.
    """
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    for _ in range(epochs):
        for step, (x, y) in enumerate(loader(batch=BATCH * world)):
            parts = [slice(None)] if sync else [slice(r, None, world) for r in range(world)]
            buffers = None
            for part in parts:
                before = [b.clone() for b in net.buffers()]
                loss = nn.functional.mse_loss(net(x[part]), y[part])
                (loss / len(parts) / batches).backward()
                buffers = buffers or [b.clone() for b in net.buffers()]
                for buffer, old in zip(net.buffers(), before, strict=True):
                    buffer.copy_(old)
            for buffer, own in zip(net.buffers(), buffers or [], strict=True):
                buffer.copy_(own)
            if (step + 1) % batches == 0:
                optimizer.step()
                optimizer.zero_grad()
    return net
