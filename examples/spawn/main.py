# SPDX-License-Identifier: BSD-3-Clause
"""Train on handwritten digits in processes that the script itself starts with `mp.spawn`.

    python main.py                                       one node: a process per GPU, else one
    python main.py --processes 2                         two processes
    python main.py --processes 2 --model-parallel        two processes, each with two stages
    python main.py --world-size 2 --rank 0 --dist-url tcp://NODE0:23456     on node 0
    python main.py --world-size 2 --rank 1 --dist-url tcp://NODE0:23456     on node 1
    RANK=1 python main.py --world-size 2 --dist-url env:// --multiprocessing-distributed
    python main.py --gpu 0                               this process alone, on that GPU

`--world-size` and `--rank` count nodes here, and every process computes its own rank from them.
`--batch-size` and `--workers` apply to a node, and are divided among its processes. With the same
settings and number of processes, runs are bitwise reproducible, even if a run was interrupted and
resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from apex.parallel import DistributedDataParallel as DDP

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support

# Settings that must not change when a run resumes from a checkpoint.
RESUMED_SETTINGS = ("seed", "batch_size", "lr", "momentum")


class Place(NamedTuple):
    """The place of a process in the job, and the devices of its model's two stages."""

    rank: int
    world_size: int
    stages: tuple[torch.device, torch.device]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Handwritten digits in processes started by mp.spawn.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--world-size", type=int, default=1, metavar="N", help="machines of the job"
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=-1,
        metavar="R",
        help="rank of this machine, 0 to world-size - 1; -1: the variable RANK with --dist-url "
        "env://, else NODE_RANK, else 0",
    )
    parser.add_argument(
        "--multiprocessing-distributed",
        action="store_true",
        help="start a process per GPU of this machine, as the script does unless --gpu is given",
    )
    parser.add_argument(
        "--gpu",
        type=int,
        metavar="G",
        help="start no processes: train in this one, on this GPU; --world-size and --rank then "
        "count processes",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes on each machine; by default as many as its GPUs serve, or 1 without a GPU",
    )
    parser.add_argument(
        "--dist-url",
        metavar="URL",
        help="where the processes meet: tcp://HOST:PORT with a free port of machine 0, env:// for "
        "MASTER_ADDR and MASTER_PORT from the environment, or file:///PATH on a disk all of them "
        "see; one machine alone needs none",
    )
    parser.add_argument(
        "--dist-backend", choices=("gloo", "nccl"), help="by default nccl on GPUs, gloo on the CPU"
    )
    parser.add_argument(
        "--model-parallel",
        action="store_true",
        help="put the first half of the model on one GPU and the second on another; each process "
        "uses two GPUs. Without GPUs, both halves are on the CPU",
    )
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="in all")
    parser.add_argument(
        "-b",
        "--batch-size",
        type=int,
        default=64,
        metavar="N",
        help="samples per step of this machine, divided among its processes",
    )
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--momentum", type=float, default=0.9, metavar="M", help="of SGD")
    parser.add_argument(
        "-j", "--workers", type=int, default=0, metavar="N", help="loader processes of this machine"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="seed everything and use deterministic kernels only, which are slower on GPUs; "
        "without it, each run differs",
    )
    support.add_checkpoint_options(parser)
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even with a GPU")
    args = parser.parse_args(argv)
    if args.rank == -1:
        from_environment = {"env://": ("RANK", "NODE_RANK")}.get(args.dist_url, ("NODE_RANK",))
        name = next((n for n in from_environment if n in os.environ), None)
        args.rank = int(os.environ[name]) if name else 0
    if args.gpu is not None:
        args.processes = 1
    if not 0 <= args.rank < args.world_size:
        parser.error(f"--rank {args.rank} is not one of {args.world_size} machines")
    if args.world_size > 1 and args.dist_url is None:
        parser.error("several machines need to know where to meet: give --dist-url")
    return args


class Net(nn.Module):
    """Convolutions on one device and linear layers on another, which may be the same.

    Images [N, 1, 8, 8] may be on any device. The logits [N, 10] are on the second device. The
    second stage waits for the first, so this is for models that do not fit on one GPU, not for
    speed.
    """

    def __init__(self, stages: tuple[torch.device, torch.device]) -> None:
        super().__init__()
        self.stages = stages
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
        ).to(stages[0])
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)
        ).to(stages[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x.to(self.stages[0], non_blocking=True))
        return self.classifier(x.to(self.stages[1], non_blocking=True))


def seed_everything(seed: int) -> None:
    """Seed this process's generators, and allow only deterministic kernels."""
    random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def take_place(local_rank: int, args: argparse.Namespace) -> Place:
    """Compute this process's rank, choose its devices, and join the process group."""
    world_size = args.world_size * args.processes
    rank = args.rank * args.processes + local_rank
    if args.gpus:
        per_process = 2 if args.model_parallel else 1
        gpu = local_rank * per_process if args.gpu is None else args.gpu
        first = torch.device("cuda", gpu)
        stages = (first, torch.device("cuda", gpu + per_process - 1))
        torch.cuda.set_device(first)
    else:
        stages = (torch.device("cpu"), torch.device("cpu"))
    store = None
    if args.dist_url is None:  # one node
        store = dist.TCPStore("127.0.0.1", args.store_port, is_master=False)
    dist.init_process_group(
        args.dist_backend or ("nccl" if args.gpus else "gloo"),
        init_method=args.dist_url,
        store=store,
        world_size=world_size,
        rank=rank,
    )
    return Place(rank, world_size, stages)


def main_worker(local_rank: int, args: argparse.Namespace) -> None:
    """The function that each process runs. `mp.spawn` passes the first argument."""
    if not args.gpus:
        torch.set_num_threads(1)
    if args.seed is not None:
        seed_everything(args.seed)
    place = take_place(local_rank, args)
    try:
        train(place, args)
    finally:
        dist.destroy_process_group()


def train(place: Place, args: argparse.Namespace) -> None:
    train_set, test_set = (TensorDataset(*split) for split in support.split_digits())
    net = Net(place.stages)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=args.momentum)
    done = 0
    if args.resume is not None:
        done = load_checkpoint(net, optimizer, place, args)
    # Wrap last: the wrapper broadcasts rank 0's parameters, so that all ranks start equal. No
    # device_ids, because the model may be on two devices.
    model = DDP(net)

    sampler = DistributedSampler(
        train_set, num_replicas=place.world_size, rank=place.rank, seed=args.seed or 0
    )
    loader = DataLoader(
        train_set,
        # Divided, so that a node's batch size does not depend on its number of processes.
        batch_size=args.batch_size // args.processes,
        sampler=sampler,
        num_workers=-(-args.workers // args.processes),
        pin_memory=args.gpus > 0,
    )
    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same on every rank
        loss = train_epoch(model, optimizer, loader, epoch, place, args)
        correct = count_correct(net, test_set, place)
        if place.rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, test accuracy "
                f"{100 * correct / len(test_set):.2f} %",
                flush=True,
            )
            if args.checkpoint is not None:
                save_checkpoint(net, optimizer, epoch + 1, args)

    digests: list[str | None] = [None] * place.world_size
    dist.all_gather_object(digests, digest(net))
    if len(set(digests)) != 1:
        raise RuntimeError(f"the ranks hold different parameters: {digests}")
    if place.rank == 0:
        print(f"final: {place.world_size} rank(s), parameters {digests[0]} on all", flush=True)


def train_epoch(
    model: DDP,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    epoch: int,
    place: Place,
    args: argparse.Namespace,
) -> float:
    """Train on this rank's share of every sample. Returns the mean loss over all ranks."""
    model.train()
    losses = torch.zeros(len(loader), device=place.stages[1])
    title = f"epoch {epoch + 1}/{args.epochs}"
    for step, (images, labels) in enumerate(support.progress(loader, title, place.rank)):
        output = model(images)
        loss = F.cross_entropy(output, labels.to(output.device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    mean = losses.mean().to(place.stages[0])
    dist.all_reduce(mean)
    return mean.item() / place.world_size


@torch.no_grad()
def count_correct(net: Net, test_set: TensorDataset, place: Place) -> int:
    """The number of test samples that are classified correctly. Each sample is on one rank."""
    net.eval()
    images, labels = (t.tensor_split(place.world_size)[place.rank] for t in test_set.tensors)
    right = (net(images).argmax(dim=1).cpu() == labels).sum().to(place.stages[0])
    dist.all_reduce(right)
    return int(right.item())


def save_checkpoint(
    net: Net, optimizer: torch.optim.Optimizer, epoch: int, args: argparse.Namespace
) -> None:
    """Write the state after `epoch` epochs. Rank 0 only."""
    state = {
        "epoch": epoch,
        "settings": {name: getattr(args, name) for name in RESUMED_SETTINGS},
        "state_dict": net.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    support.save_checkpoint(args.checkpoint, state)


def load_checkpoint(
    net: Net, optimizer: torch.optim.Optimizer, place: Place, args: argparse.Namespace
) -> int:
    """Restore the state of `save_checkpoint`. Returns the number of trained epochs."""
    settings = {name: getattr(args, name) for name in RESUMED_SETTINGS}
    state = support.read_checkpoint(args.resume, place.stages[0], settings)
    net.load_state_dict(state["state_dict"])  # copies to each parameter's own device
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def digest(net: Net) -> str:
    """The first 12 hexadecimal digits of a SHA-256 over all parameters' bits."""
    sha = hashlib.sha256()
    for parameter in net.parameters():
        sha.update(parameter.detach().cpu().numpy().tobytes())
    return sha.hexdigest()[:12]


def complete(args: argparse.Namespace) -> None:
    """Fill in defaults that depend on this host: GPUs to use, processes, and a rendezvous
    address."""
    args.gpus = 0 if args.no_cuda else torch.cuda.device_count()
    per_process = 2 if args.model_parallel else 1
    if args.gpus and args.gpus < per_process * (args.processes or 1):
        support.fail(
            f"{args.processes or 1} process(es) with {per_process} GPU(s) each do not fit "
            f"this machine's {args.gpus}: start fewer, or pass --no-cuda."
        )
    if args.processes is None:
        args.processes = max(1, args.gpus // per_process)


def main() -> None:
    args = parse_args()
    complete(args)
    if args.dist_url is None:
        # This process holds the port. A port that is only free could be taken before rank 0 opens
        # it.
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        args.store_port = server.port
    if args.gpu is not None:
        main_worker(0, args)
    else:
        mp.spawn(main_worker, nprocs=args.processes, args=(args,))


if __name__ == "__main__":
    main()
