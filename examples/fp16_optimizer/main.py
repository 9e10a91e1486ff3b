# SPDX-License-Identifier: BSD-3-Clause
"""Train a float16 network with FP16_Optimizer and Apex's DistributedDataParallel.

    python main.py
    python -m apex.parallel.multiproc --nproc 2 main.py
    torchrun --nproc_per_node=2 main.py

The network and its gradients are float16. The optimizer updates float32 copies of the parameters.
The loss is scaled so that small gradients do not become zero. apex.amp (opt_level O2) does the same
with less code, and is better for new programs. This example is for full control of every step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from apex.fp16_utils import FP16_Optimizer, network_to_half
from apex.parallel import DistributedDataParallel as DDP

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support

# Settings that must not change when a run resumes from a checkpoint.
RESUMED_SETTINGS = ("batch_size", "lr", "static_loss_scale", "clip")


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
    support.add_checkpoint_options(parser)
    support.add_local_rank(parser)
    return parser.parse_args(argv)


def build_network() -> nn.Module:
    """Three linear layers with batch norm: [N, 1, 8, 8] -> [N, 10]."""
    return nn.Sequential(
        nn.Flatten(),
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
    support.launch_alone_unless_launched()
    device = support.choose_device(args.local_rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method="env://")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images, labels = (tensor.to(device) for tensor in support.digits())

    # Parameters become float16, batch norm stays float32, and inputs are cast.
    model = network_to_half(build_network().to(device))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # From here on, the optimizer holds the float32 copies.
    if args.static_loss_scale is not None:
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=args.static_loss_scale)
    else:
        optimizer = FP16_Optimizer(
            optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**16}
        )

    done = 0
    settings = {name: getattr(args, name) for name in RESUMED_SETTINGS}
    if args.resume is not None:
        state = support.read_checkpoint(args.resume, device, settings)
        done = state["epoch"]
        model.load_state_dict(state["model"])
        # It holds the float32 copies. Resuming from the float16 parameters would round them.
        optimizer.load_state_dict(state["optimizer"])

    for epoch in range(done, args.epochs):
        # All ranks get the same batches, and each takes its slice.
        batches = support.global_batches(len(labels), args.batch_size, world_size, epoch)
        total = torch.zeros((), device=device)
        skipped = 0
        for batch in support.progress(batches, f"epoch {epoch + 1}/{args.epochs}", rank):
            samples = batch[rank * args.batch_size : (rank + 1) * args.batch_size].to(device)
            output = model(images[samples])
            loss = F.cross_entropy(output.float(), labels[samples])
            optimizer.zero_grad()
            # Replaces loss.backward(). It scales the loss and runs backward, which averages the
            # ranks' float16 gradients. Then it writes unscaled float32 gradients.
            optimizer.backward(loss)
            if args.clip is not None:
                optimizer.clip_master_grads(args.clip)
            optimizer.step()  # does nothing after an overflow
            skipped += optimizer.overflow
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            mean = total.item() / len(batches) / world_size
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {mean:.4f}, loss scale "
                f"{optimizer.loss_scale:g}, {skipped} of {len(batches)} steps skipped",
                flush=True,
            )
            if args.checkpoint is not None:
                state = {
                    "epoch": epoch + 1,
                    "settings": settings,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                support.save_checkpoint(args.checkpoint, state)


if __name__ == "__main__":
    main()
