# SPDX-License-Identifier: BSD-3-Clause
"""Training a small convolutional network on the digits: every level follows float32."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from amp_support import DEVICES, fresh_amp  # noqa: F401
from ddp_support import require
from torch import nn

from apex import amp

require("sklearn")

EPOCHS = 8
BATCH = 150

#: Largest difference of an epoch's mean loss from that of float32, relative to it plus 0.1.
TOLERANCE = {
    "O0": 1e-6,
    "O1": 0.005,
    "O2": 0.005,
    "O3": 0.01,
    "O1-bf16": 0.02,
    "O2-bf16": 0.02,
    "O3-bf16": 0.05,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 16, 32)
        self.output = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2)
        return self.output(F.relu(self.hidden(x.flatten(1))))


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def train(level: str | None, device: str) -> tuple[list[float], float]:
    images, labels, test_images, test_labels = (data.to(device) for data in digits())
    torch.manual_seed(0)
    model: nn.Module = Net().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    curve = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for rows in order.to(device).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            total += loss.item() * len(rows)
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
        curve.append(total / len(images))
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    return curve, accuracy


@functools.cache
def float32_curve(device: str) -> list[float]:
    torch.backends.cudnn.allow_tf32 = False
    curve, accuracy = train(None, device)
    assert curve[-1] < 0.15 and accuracy > 0.85, "the reference itself does not learn"
    return curve


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", TOLERANCE)
def test_digits_loss_curve_follows_float32(level: str, device: str) -> None:
    reference = float32_curve(device)
    curve, accuracy = train(level, device)
    assert accuracy > 0.85
    # Sums on a GPU have a different order every time, also in float32.
    tolerance = TOLERANCE[level] + (0.01 if device == "cuda" else 0)
    for epoch, (mine, want) in enumerate(zip(curve, reference, strict=True)):
        assert abs(mine - want) <= tolerance * (want + 0.1), (epoch, curve, reference)
