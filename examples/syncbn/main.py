# SPDX-License-Identifier: BSD-3-Clause
"""Train a small CNN on handwritten digits with synchronized batch norm.

    python main.py                                   # one process
    torchrun --nproc-per-node 4 main.py              # four ranks, the same curve
    torchrun --nproc-per-node 4 main.py --norm local --batch-per-rank 2

With ``--batch-per-rank``, the batch grows with the number of ranks. Without it, ``--batch`` is
split among them, and any number of ranks takes the same steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel, convert_syncbn_model

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support


def digits(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1797 images of 8x8, every fifth of them in the test set."""
    images, labels = support.digits()
    images = images.to(dtype)  # exact: 17 shades, multiples of 1/16
    test = torch.arange(len(labels)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64, bias=False),
        nn.BatchNorm1d(64),  # one value per image and channel, so this norm needs a large batch
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--norm", choices=["sync", "local"], default="sync", help="statistics of all ranks or one"
    )
    parser.add_argument(
        "--batch",
        type=support.positive_int,
        default=64,
        metavar="N",
        help="images per step over all ranks (default: 64)",
    )
    parser.add_argument(
        "--batch-per-rank", type=support.positive_int, metavar="N", help="instead of --batch"
    )
    parser.add_argument(
        "--steps", type=support.positive_int, default=100, metavar="N", help="default: 100"
    )
    parser.add_argument(
        "--lr", type=support.positive_float, default=0.05, help="learning rate (default: 0.05)"
    )
    parser.add_argument("--double", action="store_true", help="train in float64")
    parser.add_argument(
        "--output",
        type=support.output_file,
        metavar="FILE",
        help="write losses and accuracy here, as JSON",
    )
    options = parser.parse_args()

    torch.set_num_threads(1)
    distributed = support.launched()
    if distributed:
        dist.init_process_group("gloo")
    try:
        train(options, distributed)
    finally:
        if distributed:
            dist.destroy_process_group()


def train(options: argparse.Namespace, distributed: bool) -> None:
    rank = dist.get_rank() if distributed else 0
    ranks = dist.get_world_size() if distributed else 1
    batch = options.batch if options.batch_per_rank is None else options.batch_per_rank * ranks
    least = 2 if options.norm == "sync" else 2 * ranks  # images whose statistics are combined
    if batch < least:
        support.refuse(
            f"{options.norm} batch norm on {ranks} rank(s) needs {least} images per step, not "
            f"{batch}: raise --batch or --batch-per-rank."
        )

    dtype = torch.float64 if options.double else torch.float32
    images, labels, test_images, test_labels = digits(dtype)
    torch.manual_seed(0)
    model = build_model().to(dtype)
    if options.norm == "sync":
        model = convert_syncbn_model(model)
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    order = torch.Generator().manual_seed(1)
    losses = []
    bar = support.progress(range(options.steps), "training", rank)
    for step in bar:
        chosen = torch.randint(len(labels), (batch,), generator=order)
        # every rank draws the same batch and takes its slice
        mine = chosen.tensor_split(ranks)[rank]
        optimizer.zero_grad()
        # The mean over the whole batch, even if ranks have slices of different sizes: the sum over
        # this rank's images times the number of ranks, by which DistributedDataParallel divides.
        total = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (total * ranks / batch).backward()
        optimizer.step()
        loss = total.detach() / batch
        if distributed:
            dist.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0 and step % 20 == 0:
            bar.write(f"step {step:4d}  loss {losses[-1]:.6f}", file=sys.stdout)
            sys.stdout.flush()

    # Each rank tests its own model. With local statistics these differ, because the running
    # statistics are those of the rank's own batches. A checkpoint would hold rank 0's.
    model.eval()
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).double().mean().item()
    if rank == 0:
        print(f"{options.norm} batch norm, {ranks} rank(s), batch {batch}: accuracy {right:.4f}")
        if options.output:
            result = {"losses": losses, "accuracy": right, "ranks": ranks}
            support.write_file(options.output, json.dumps(result).encode())


if __name__ == "__main__":
    support.run(main)
