# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of checkpoints: a small model with amp, its training loop, and a file."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.parallel.LARC import LARC

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4),
    "larc": lambda p: LARC(torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4)),
}


def build(seed: int, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return model, OPTIMIZERS[optimizer](model.parameters())


def initialize(model: nn.Module, optimizer: Any, level: str) -> tuple[nn.Module, Any]:
    return amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0
    )


def train(model: nn.Module, optimizer: Any, steps: range, overflow_at: int = -1) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator)
        target = torch.randint(0, 3, (8,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), target)
        with amp.scale_loss(loss, optimizer, loss_id=step % 2) as scaled:
            scaled.backward()
            if step == overflow_at:
                model[0].weight.grad[0, 0] = float("inf")
        optimizer.step()
        losses.append(loss.item())
    return losses


def through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
