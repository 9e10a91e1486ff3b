# SPDX-License-Identifier: BSD-3-Clause
"""ResNet-18, -34 and -50: He et al., "Deep Residual Learning for Image Recognition", 2015, table 1.

main.py uses it on machines without torchvision, and torchvision's networks otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut: [N, C, H, W] -> [N, width, H/stride, W/stride]."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 beside a shortcut: [N, C, H, W] -> [N, 4 * width, H/stride, W/stride]."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = shortcut(channels, 4 * width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def shortcut(channels: int, out_channels: int, stride: int) -> nn.Module:
    """The identity, or a 1x1 convolution if the shape changes."""
    if channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResNet(nn.Module):
    """Images [N, 3, H, W] -> logits [N, num_classes].

    Args:
        block: the class of the blocks in the four groups.
        depths: blocks in each group.
        num_classes: outputs of the last layer.
    """

    def __init__(
        self, block: type[Block] | type[Bottleneck], depths: tuple[int, ...], num_classes: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        groups, channels = [], 64
        for index, depth in enumerate(depths):
            width = 64 * 2**index
            for position in range(depth):
                stride = 2 if index > 0 and position == 0 else 1
                groups.append(block(channels, width, stride))
                channels = width * block.expansion
        self.groups = nn.Sequential(*groups)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.groups(self.stem(x))
        return self.fc(x.mean(dim=(2, 3)))


LAYOUTS = {
    "resnet18": (Block, (2, 2, 2, 2)),
    "resnet34": (Block, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
}


def build(name: str, num_classes: int) -> ResNet:
    """One of LAYOUTS by name. Raises KeyError for another name."""
    block, depths = LAYOUTS[name]
    return ResNet(block, depths, num_classes)
