# SPDX-License-Identifier: BSD-3-Clause
"""The smallest script with both halves of Apex: mixed precision and distributed training.

    python simple_ddp_amp.py
    python -m torch.distributed.launch --nproc_per_node=2 simple_ddp_amp.py
    python -m apex.parallel.multiproc --nproc 2 simple_ddp_amp.py

It is a well-known outline with its gaps filled in: the data set is scikit-learn's handwritten
digits, the model a small convolutional network. README.md lists what else had to change.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from tqdm import tqdm

from apex import amp
from apex.parallel import DistributedDataParallel


def load_digits() -> torch.utils.data.TensorDataset:
    """1,797 images [1, 8, 8] float32 in 0..1, and their labels."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        sys.exit(
            "simple_ddp_amp.py: the digits come with scikit-learn: run `pip install scikit-learn`."
        )
    pixels, labels = load(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return torch.utils.data.TensorDataset(images, torch.tensor(labels, dtype=torch.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--local_rank",
        "--local-rank",
        default=int(os.environ.get("LOCAL_RANK", 0)),
        type=int,
        help="index of this process on its machine; launchers set it",
    )
    parser.add_argument("--epochs", default=10, type=int, help="default: 10")
    parser.add_argument("--opt-level", default="O1", help="of apex.amp, O0 to O3; default: O1")
    args = parser.parse_args()

    # Started without a launcher, this process is a job of its own.
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

    use_cuda = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if use_cuda else "gloo")
    if use_cuda:
        torch.cuda.set_device(args.local_rank)
    torch.manual_seed(0)

    train_dataset = load_digits()
    #
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    #
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=64 // dist.get_world_size() or 1, sampler=train_sampler
    )

    model = nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    if use_cuda:
        model.cuda()
    criterion = F.cross_entropy
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    ####
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    model = DistributedDataParallel(model, device_ids=[args.local_rank])

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        losses = torch.zeros(len(train_loader))
        bar = tqdm(train_loader, desc=f"epoch {epoch + 1}", disable=dist.get_rank() != 0)
        for batch_idx, (data, target) in enumerate(bar):
            images = data.cuda(non_blocking=True) if use_cuda else data
            target = target.cuda(non_blocking=True) if use_cuda else target
            output = model(images)
            loss = criterion(output, target)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses[batch_idx] = loss.detach()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: loss {losses.mean():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
