# SPDX-License-Identifier: BSD-3-Clause
"""Train a float16 network with FP16_Optimizer and Apex's DistributedDataParallel.

    python main.py
    python -m apex.parallel.multiproc --nproc 2 main.py
    torchrun --nproc_per_node=2 main.py

The network and its gradients are float16; the optimizer updates float32 copies of the parameters,
and the loss is scaled so that small gradients survive. New programs get the same, with less to
write, from apex.amp (opt_level O2); this is for those that want every step in their own hands.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from apex.fp16_utils import FP16_Optimizer, network_to_half
from apex.parallel import DistributedDataParallel as DDP


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Digits with a float16 network, FP16_Optimizer and DistributedDataParallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="epochs in all")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="samples per rank")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument(
        "--static-loss-scale",
        type=float,
        metavar="S",
        help="scale every loss by this; without it the scale adapts itself",
    )
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip the gradient's norm")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="write one after each epoch"
    )
    parser.add_argument("--resume", type=Path, metavar="PATH", help="continue from this checkpoint")
    parser.add_argument(
        "--local_rank",
        "--local-rank",
        type=int,
        default=int(os.environ.get("LOCAL_RANK", 0)),
        metavar="R",
        help="index of this process on its machine; launchers set it",
    )
    args = parser.parse_args(argv)
    if args.checkpoint is not None and not args.checkpoint.absolute().parent.is_dir():
        parser.error(f"cannot write to {args.checkpoint}: its folder does not exist")
    if args.resume is not None and not args.resume.is_file():
        parser.error(f"there is no checkpoint {args.resume} to resume from")
    return args


def load_digits(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [1797, 64] float32 in 0..1 and labels [1797] int64, on the device."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        sys.exit("main.py: the digits come with scikit-learn: run `pip install scikit-learn`.")
    pixels, labels = load(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) / 16
    return images.to(device), torch.tensor(labels, dtype=torch.int64).to(device)


def build_network() -> nn.Module:
    """Three linear layers with batch norm: [N, 64] -> [N, 10]."""
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def main() -> None:
    args = parse_args()
    # Started without a launcher, this process is a job of its own.
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", args.local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", init_method="env://")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images, labels = load_digits(device)

    # Parameters to float16, batch norm kept in float32; the input is converted on the way in.
    model = network_to_half(build_network().to(device))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # From here on the optimizer holds the float32 copies.
    if args.static_loss_scale is not None:
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=args.static_loss_scale)
    else:
        optimizer = FP16_Optimizer(
            optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**16}
        )

    done = 0
    if args.resume is not None:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        done = state["epoch"]
        model.load_state_dict(state["model"])
        # Holds the float32 copies: continuing from the float16 parameters would round them.
        optimizer.load_state_dict(state["optimizer"])

    for epoch in range(done, args.epochs):
        generator = torch.Generator().manual_seed(epoch)
        global_batch = args.batch_size * world_size
        order = torch.randperm(len(labels), generator=generator)
        # Whole global batches only; each rank takes its slice of each.
        batches = order[: len(order) // global_batch * global_batch].split(global_batch)
        total = torch.zeros((), device=device)
        skipped = 0
        bar = tqdm(batches, desc=f"epoch {epoch + 1}", unit="step", disable=rank != 0)
        for batch in bar:
            samples = batch[rank * args.batch_size : (rank + 1) * args.batch_size].to(device)
            output = model(images[samples])
            loss = F.cross_entropy(output.float(), labels[samples])
            optimizer.zero_grad()
            # Instead of loss.backward(): scales the loss, runs backward, in which the ranks'
            # float16 gradients are averaged, and writes unscaled float32 gradients.
            optimizer.backward(loss)
            if args.clip is not None:
                optimizer.clip_master_grads(args.clip)
            optimizer.step()  # does nothing after an overflow
            skipped += optimizer.overflow
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            mean = total.item() / max(1, len(batches)) / world_size
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {mean:.4f}, loss scale "
                f"{optimizer.loss_scale:g}, {skipped} of {len(batches)} steps skipped",
                flush=True,
            )
            if args.checkpoint is not None:
                state = {
                    "epoch": epoch + 1,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                unfinished = args.checkpoint.with_name(args.checkpoint.name + ".part")
                torch.save(state, unfinished)
                os.replace(unfinished, args.checkpoint)


if __name__ == "__main__":
    main()
