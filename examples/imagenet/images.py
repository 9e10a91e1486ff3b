# SPDX-License-Identifier: BSD-3-Clause
"""The images for main.py: folders in ImageNet's layout, or synthetic images."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch.utils.data import Dataset

# Mean and standard deviation of ImageNet's red, green and blue values, in 0..1.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


class Images(NamedTuple):
    """Datasets of pairs: image [3, size, size] float32, normalized, and label int."""

    train: Dataset
    val: Dataset
    num_classes: int


class SyntheticImages(Dataset):
    """Noise on a coarse pattern that is specific to the class. The same in every run.

    Args:
        count: number of images.
        size: height and width in pixels.
        num_classes: labels cycle from 0 to num_classes - 1.
        seed: of the noise. Datasets with different seeds share the patterns.
    """

    def __init__(self, count: int, size: int, num_classes: int, seed: int) -> None:
        self.count, self.size, self.num_classes, self.seed = count, size, num_classes, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        label = index % self.num_classes
        pattern = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(label))
        noise = torch.Generator().manual_seed(self.seed * self.count + index)
        image = torch.nn.functional.interpolate(pattern[None], size=(self.size, self.size))[0]
        return image + torch.randn(image.shape, generator=noise), label


class FolderImages(Dataset):
    """The images in folder/CLASS/, read by Pillow.

    In training, a random part of the image is resized to the result. It has 8 to 100 % of the area
    and an aspect ratio of 3:4 to 4:3. Half of the images are mirrored (Szegedy et al., "Going
    Deeper with Convolutions", 2014, section 6). Otherwise it is the middle 7/8 of the shorter side.

    Args:
        folder: contains one folder per class.
        classes: the class names. The label is the index.
        size: height and width of the result in pixels.
        train: whether to choose at random.
    """

    def __init__(self, folder: Path, classes: list[str], size: int, train: bool) -> None:
        self.size, self.train = size, train
        self.found = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        path, label = self.found[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = random_part(*image.size) if self.train else middle(*image.size)
        pixels = numpy.array(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box))
        values = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        if self.train and torch.rand(()) < 0.5:
            values = values.flip(2)
        mean, deviation = (torch.tensor(rgb).view(3, 1, 1) for rgb in (MEAN, DEVIATION))
        return (values - mean) / deviation, label


def middle(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the centered square with 7/8 of the shorter side."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_part(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a part with random area, shape and position."""
    for _ in range(10):
        area, shape, x, y = torch.rand(4).tolist()
        area = (0.08 + 0.92 * area) * width * height
        ratio = math.exp((2 * shape - 1) * math.log(4 / 3))
        part_width, part_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if part_width <= width and part_height <= height:
            left, top = x * (width - part_width), y * (height - part_height)
            return left, top, left + part_width, top + part_height
    return middle(width, height)


def load(args: argparse.Namespace) -> Images:
    """The datasets that the command line requests."""
    if args.synthetic is not None:
        return Images(
            SyntheticImages(args.synthetic, args.image_size, args.num_classes, seed=1),
            SyntheticImages(max(1, args.synthetic // 10), args.image_size, args.num_classes, 2),
            args.num_classes,
        )
    if args.data is None:
        raise SystemExit("name the folder with the images, or use --synthetic 1000")
    classes = sorted(path.name for path in (args.data / "train").iterdir() if path.is_dir())
    train = FolderImages(args.data / "train", classes, args.image_size, train=True)
    val = FolderImages(args.data / "val", classes, args.image_size, train=False)
    return Images(train, val, len(classes))
