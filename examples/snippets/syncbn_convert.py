# SPDX-License-Identifier: BSD-3-Clause
"""A network with ordinary batch norm, converted to synchronized batch norm and trained.

    python syncbn_convert.py
    python -m apex.parallel.multiproc --nproc 2 syncbn_convert.py

Each rank has few samples per step, which is when synchronized statistics matter. The data are the
handwritten digits that scikit-learn ships.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apex

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", default=3, type=int, help="default: 3")
    parser.add_argument("--batch-size", default=8, type=int, help="samples per rank; default: 8")
    support.add_local_rank(parser)
    args = parser.parse_args()

    support.launch_alone_unless_launched()
    device = support.choose_device(args.local_rank)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    images, labels = (tensor.to(device) for tensor in support.digits())
    model = build_model()
    # model is an instance of torch.nn.Module
    sync_bn_model = apex.parallel.convert_syncbn_model(model)
    sync_bn_model.to(device)
    converted = sum(isinstance(m, apex.parallel.SyncBatchNorm) for m in sync_bn_model.modules())
    if rank == 0:
        print(f"{converted} batch norms are synchronized over {world_size} rank(s)", flush=True)

    ddp = apex.parallel.DistributedDataParallel(sync_bn_model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        # All ranks get the same batches, and each takes its slice.
        batches = support.global_batches(len(labels), args.batch_size, world_size, epoch)
        total = torch.zeros((), device=device)
        for batch in support.progress(batches, f"epoch {epoch + 1}", rank):
            samples = batch[rank * args.batch_size : (rank + 1) * args.batch_size].to(device)
            loss = F.cross_entropy(ddp(images[samples]), labels[samples])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            mean = total.item() / len(batches) / world_size
            print(f"epoch {epoch + 1}/{args.epochs}: loss {mean:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
