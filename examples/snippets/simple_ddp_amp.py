# SPDX-License-Identifier: BSD-3-Clause
"""The smallest script with both halves of Apex: mixed precision and distributed training.

    python simple_ddp_amp.py
    python -m torch.distributed.launch --nproc_per_node=2 simple_ddp_amp.py
    python -m apex.parallel.multiproc --nproc 2 simple_ddp_amp.py

It completes a well-known outline. The dataset is scikit-learn's handwritten digits, and the model
is a small convolutional network. README.md lists the other changes.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

from apex import amp
from apex.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    support.add_local_rank(parser)
    parser.add_argument("--epochs", default=10, type=int, help="default: 10")
    parser.add_argument(
        "--opt-level",
        default="O1",
        choices=("O0", "O1", "O2", "O3"),
        help="of apex.amp; default: O1",
    )
    args = parser.parse_args()

    # Without a launcher, this process is a job of its own.
    support.launch_alone_unless_launched()

    use_cuda = support.choose_device(args.local_rank).type == "cuda"
    dist.init_process_group(backend="nccl" if use_cuda else "gloo")
    torch.manual_seed(0)

    train_dataset = torch.utils.data.TensorDataset(*support.digits())
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
        bar = support.progress(train_loader, f"epoch {epoch + 1}", dist.get_rank())
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
