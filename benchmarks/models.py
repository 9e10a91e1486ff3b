# SPDX-License-Identifier: BSD-3-Clause
"""The models that the benchmarks train, each with a batch.

They differ in their gradients: hundreds of small ones, the mix of a convolutional network, the
similar sizes of a transformer, and a few that are so large that a copy is expensive.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual unit of a ResNet: two 3x3 convolutions, or 1x1, 3x3, 1x1 with ``expansion`` 4.

    K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, figure 5, with the
    stride on the 3x3 convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        outputs = width * expansion
        if expansion == 1:
            shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        else:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(i, o, size, step, size // 2, bias=False) for i, o, size, step in shapes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in shapes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        last = len(self.convolutions) - 1
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            if i < last:
                y = y.relu()
        return (y + self.shortcut(x)).relu()


def resnet(units: list[int], expansion: int, classes: int = 1000) -> nn.Sequential:
    """A ResNet for [N, 3, H, W] images with ``units[i]`` residual units in stage i."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, count in enumerate(units):
        width = 64 << stage
        for unit in range(count):
            layers.append(Residual(inputs, width, 2 if stage and not unit else 1, expansion))
            inputs = width * expansion
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers)


class Transformer(nn.Module):
    """Encoder over [N, T] tokens to logits [N, T, vocabulary]; 24.4 million elements in 148
    tensors."""

    def __init__(
        self, width: int = 384, layers: int = 12, heads: int = 6, vocabulary: int = 4096
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _chain(width: int, layers: int, bias: bool) -> nn.Sequential:
    """A chain of linear layers. Orthogonal weights keep values away from 0 and infinity."""
    chain = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers)))
    for layer in chain:
        if width <= 64:
            nn.init.orthogonal_(layer.weight)
        else:  # nearly orthogonal, without a decomposition of a 4096 x 4096 matrix
            nn.init.normal_(layer.weight, std=width**-0.5)
    return chain


def _small(device: str) -> tuple[nn.Module, Tensor]:
    return _chain(64, 200, bias=True), torch.randn(8, 64)


def _resnet18(device: str) -> tuple[nn.Module, Tensor]:
    batch, side = (8, 64) if device == "cpu" else (64, 224)
    return resnet([2, 2, 2, 2], 1), torch.randn(batch, 3, side, side)


def _resnet50(device: str) -> tuple[nn.Module, Tensor]:
    batch, side = (4, 64) if device == "cpu" else (64, 224)
    return resnet([3, 4, 6, 3], 4), torch.randn(batch, 3, side, side)


def _transformer(device: str) -> tuple[nn.Module, Tensor]:
    batch, length = (4, 64) if device == "cpu" else (32, 256)
    return Transformer(), torch.randint(4096, (batch, length))


def _linears(device: str) -> tuple[nn.Module, Tensor]:
    return _chain(4096, 4, bias=False), torch.randn(32 if device == "cpu" else 1024, 4096)


MODELS: dict[str, tuple[str, Callable[[str], tuple[nn.Module, Tensor]]]] = {
    "small": ("400 parameters of 64x64 and 64", _small),
    "resnet18": ("ResNet-18", _resnet18),
    "resnet50": ("ResNet-50", _resnet50),
    "transformer": ("transformer, 148 parameters", _transformer),
    "linears": ("four 4096x4096 linear layers", _linears),
}


def make(name: str, device: str) -> tuple[nn.Module, Tensor]:
    """The model and one batch for it on ``device`` ("cpu" or "cuda"), the same on every rank."""
    torch.manual_seed(0)
    model, batch = MODELS[name][1](device)
    return model.to(device), batch.to(device)


def twin(model: nn.Module) -> nn.Module:
    """A copy with separate parameters for autograd that share the original's memory.

    Many wrappers of one model then fit into memory. No optimizer steps are taken.
    """
    copies: dict[int, object] = {}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    return copy.deepcopy(model, copies)


def megabytes(model: nn.Module) -> float:
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
