# SPDX-License-Identifier: BSD-3-Clause
"""The tutorial's data: MNIST if available, otherwise scikit-learn's digits resized to MNIST's
size."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the data options that all scripts of the tutorial share."""
    parser.add_argument(
        "--data",
        choices=("auto", "mnist", "digits"),
        default="auto",
        help="mnist: 60,000 images through torchvision; digits: the 1,797 images of scikit-learn, "
        "enlarged from 8x8 to 28x28 pixels; auto (default): mnist if it is there, else digits",
    )
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where MNIST's files are"
    )
    parser.add_argument("--download", action="store_true", help="fetch MNIST into --data-dir")
    parser.add_argument(
        "--images", type=int, metavar="N", help="train on the first N images only; default: all"
    )


def training_set(args: argparse.Namespace, say: bool) -> TensorDataset:
    """Images [N, 1, 28, 28] float32 in 0..1, and labels [N] int64, on the CPU.

    Call it once, in the process that the user starts. Then the download happens once.

    Args:
        args: with the options that ``add_arguments`` adds.
        say: whether to print which data is used.
    """
    data = args.data
    if data == "auto":
        data = "mnist" if args.download or _mnist(args, download=False) is not None else "digits"
    if data == "mnist":
        dataset = _mnist(args, args.download)
        if dataset is None:
            support.fail(
                f"MNIST is not in {args.data_dir}, or torchvision is not installed: run "
                "`pip install torchvision` and start with --download, or use --data digits."
            )
    else:
        dataset = _digits()
    if args.images is not None:
        dataset = TensorDataset(*dataset[: args.images])
    if say:
        name = "MNIST" if data == "mnist" else "scikit-learn's digits, enlarged to 28x28"
        print(f"data: {name}, {len(dataset)} images", flush=True)
    return dataset


def _mnist(args: argparse.Namespace, download: bool) -> TensorDataset | None:
    try:
        from torchvision.datasets import MNIST

        mnist = MNIST(str(args.data_dir), train=True, download=download)
    except (ImportError, OSError, RuntimeError):
        return None
    return TensorDataset(mnist.data.unsqueeze(1).to(torch.float32) / 255, mnist.targets)


def _digits() -> TensorDataset:
    images, labels = support.digits()
    # 8x8 -> 24x24, and a margin of 2 pixels as in MNIST.
    images = F.pad(F.interpolate(images, scale_factor=3, mode="bilinear"), (2, 2, 2, 2))
    return TensorDataset(images, labels)
