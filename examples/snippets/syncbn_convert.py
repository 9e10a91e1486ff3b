# SPDX-License-Identifier: BSD-3-Clause
"""A network with ordinary batch norm, converted to synchronized batch norm and trained.

    python syncbn_convert.py
    python -m apex.parallel.multiproc --nproc 2 syncbn_convert.py

Each rank has few samples per step, which is where synchronized statistics matter. The data are the
handwritten digits that scikit-learn ships.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import apex


def load_digits(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [1797, 1, 8, 8] float32 in 0..1 and labels [1797] int64, on the device."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        sys.exit(
            "syncbn_convert.py: the digits come with scikit-learn: run `pip install scikit-learn`."
        )
    pixels, labels = load(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images.to(device), torch.tensor(labels, dtype=torch.int64).to(device)


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
    parser.add_argument(
        "--local_rank",
        "--local-rank",
        default=int(os.environ.get("LOCAL_RANK", 0)),
        type=int,
        help="index of this process on its machine; launchers set it",
    )
    args = parser.parse_args()

    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", args.local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    images, labels = load_digits(device)
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
        # The same order on every rank, of which each takes its slice; whole global batches only.
        generator = torch.Generator().manual_seed(epoch)
        global_batch = args.batch_size * world_size
        order = torch.randperm(len(labels), generator=generator)
        batches = order[: len(order) // global_batch * global_batch].split(global_batch)
        total = torch.zeros((), device=device)
        for batch in tqdm(batches, desc=f"epoch {epoch + 1}", disable=rank != 0):
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
