# SPDX-License-Identifier: BSD-3-Clause
"""Step 3 of the tutorial: many processes, and mixed precision with Apex."""

import argparse
import os
import sys
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
import digits
import example_support as support
from mnist import ConvNet

# isort: split
#########################################################
from apex import amp
from apex.parallel import DistributedDataParallel as DDP

#########################################################


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--nodes", default=1, type=int, metavar="N", help="machines")
    parser.add_argument(
        "-g", "--gpus", default=1, type=int, help="GPUs per machine; without GPUs, processes"
    )
    parser.add_argument("-nr", "--nr", default=0, type=int, help="rank of this machine, from 0")
    parser.add_argument("--epochs", default=2, type=int, metavar="N", help="epochs; default: 2")
    parser.add_argument("--batch-size", default=100, type=int, help="per process; default: 100")
    parser.add_argument("--lr", default=0.01, type=float, help="learning rate; default: 0.01")
    #########################################################
    parser.add_argument(
        "--opt-level",
        default="O1",
        choices=("O0", "O1", "O2", "O3"),
        help="of apex.amp; default: O1",
    )
    #########################################################
    digits.add_arguments(parser)
    args = parser.parse_args()
    if torch.cuda.is_available() and args.gpus > torch.cuda.device_count():
        parser.error(f"-g {args.gpus}: this machine has {torch.cuda.device_count()} GPUs")
    if args.nr >= args.nodes:
        parser.error(f"-nr {args.nr} is not one of {args.nodes} machines")
    train_dataset = digits.training_set(args, say=args.nr == 0)
    args.world_size = args.gpus * args.nodes
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "8888")
    mp.spawn(train, nprocs=args.gpus, args=(args, train_dataset))


def train(gpu: int, args: argparse.Namespace, train_dataset: torch.utils.data.Dataset) -> None:
    torch.manual_seed(0)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", gpu) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // args.gpus))
    rank = args.nr * args.gpus + gpu
    dist.init_process_group(
        backend="nccl" if use_cuda else "gloo",
        init_method="env://",
        world_size=args.world_size,
        rank=rank,
    )

    model = ConvNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr)

    #########################################################
    # Mixed precision first, then wrap the model
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    model = DDP(model)
    #########################################################

    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=args.world_size, rank=rank
    )
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        pin_memory=use_cuda,
        shuffle=False,
        sampler=train_sampler,
    )

    start = datetime.now()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for images, labels in support.progress(train_loader, f"epoch {epoch + 1}", rank):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            loss = criterion(model(images), labels)

            optimizer.zero_grad()
            #################################################
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            #################################################
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        total /= args.world_size
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {total.item() / len(train_loader):.4f}",
                flush=True,
            )
    if rank == 0:
        print(f"training complete in {datetime.now() - start}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
