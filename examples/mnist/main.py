# SPDX-License-Identifier: BSD-3-Clause
"""Train a small network on handwritten digits, on one process or on many.

Start it in any of these ways:

    python main.py
    torchrun --nproc_per_node=2 main.py
    python -m torch.distributed.launch --nproc_per_node=2 main.py

Everything that turns the one-process program into a distributed one is between the lines
``#=====START: ADDED FOR DISTRIBUTED======`` and ``#=====END:   ADDED FOR DISTRIBUTED======``.

Every rank takes its own slice of the same global batches, and the network has neither batch norm
nor dropout. So the losses equal those of a one-process run up to float32 rounding, for any number
of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# isort: off
# =====START: ADDED FOR DISTRIBUTED======
import torch.distributed as dist

from apex.parallel import DistributedDataParallel as DDP
# =====END:   ADDED FOR DISTRIBUTED======
# isort: on

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support

# Settings that must not change when a run resumes from a checkpoint.
RESUMED_SETTINGS = ("dataset", "seed", "batch_size", "lr", "gamma", "momentum")


class Job(NamedTuple):
    """The place of this process in the job."""

    rank: int
    world_size: int
    device: torch.device
    backend: str  # "none" without a process group


class Split(NamedTuple):
    """Images [N, 1, H, W] float32 and their labels [N] int64, both on the training device."""

    images: torch.Tensor
    labels: torch.Tensor


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Handwritten digits with apex.parallel.DistributedDataParallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--dataset",
        choices=("digits", "mnist"),
        default="digits",
        help="digits: the 1,797 images of 8x8 pixels that scikit-learn ships, 1,437 to train on "
        "and 360 to test on; mnist: torchvision's MNIST, 60,000 and 10,000 images of 28x28 pixels",
    )
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where MNIST's files are"
    )
    parser.add_argument("--download", action="store_true", help="fetch MNIST into --data-dir")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=64,
        metavar="N",
        help="samples per step over all ranks together",
    )
    parser.add_argument(
        "--test-batch-size",
        type=int,
        default=1000,
        metavar="N",
        help="samples per forward pass of one rank while testing",
    )
    parser.add_argument("--epochs", type=int, default=30, metavar="N", help="epochs in all")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of the first epoch")
    parser.add_argument(
        "--gamma", type=float, default=0.93, help="factor on the learning rate after every epoch"
    )
    parser.add_argument("--momentum", type=float, default=0.9, metavar="M", help="momentum of SGD")
    parser.add_argument("--seed", type=int, default=1, help="seeds the weights and the shuffling")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even with a GPU")
    support.add_checkpoint_options(parser, write="--save")
    parser.add_argument(
        "--loss-log", type=Path, metavar="FILE", help="write the loss of every step here, as JSON"
    )
    # =====START: ADDED FOR DISTRIBUTED======
    # torch.distributed.launch passes it, torchrun and others set LOCAL_RANK.
    support.add_local_rank(parser)
    # =====END:   ADDED FOR DISTRIBUTED======
    return parser.parse_args(argv)


def start_job(args: argparse.Namespace) -> Job:
    """Choose the device. If a launcher started several processes, join them."""
    use_cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda" if use_cuda else "cpu")
    job = Job(rank=0, world_size=1, device=device, backend="none")
    # =====START: ADDED FOR DISTRIBUTED======
    # A launcher sets the place of each process in the environment. Without one, train alone.
    if support.launched():
        device = support.choose_device(args.local_rank, use_cuda)
        backend = "nccl" if use_cuda else "gloo"
        dist.init_process_group(backend=backend, init_method="env://")
        job = Job(dist.get_rank(), dist.get_world_size(), device, backend)
    # =====END:   ADDED FOR DISTRIBUTED======
    return job


def load_data(args: argparse.Namespace, job: Job) -> tuple[Split, Split]:
    """The training and the test split, whole, on this rank's device."""
    splits = load_mnist(args, job) if args.dataset == "mnist" else support.split_digits()
    train, test = (Split(images.to(job.device), labels.to(job.device)) for images, labels in splits)
    return train, test


def load_mnist(args: argparse.Namespace, job: Job) -> tuple[Split, Split]:
    """60,000 training and 10,000 test images, normalized by the training set's mean and
    deviation."""
    from torchvision.datasets import MNIST

    if args.download:
        downloads = True
        # =====START: ADDED FOR DISTRIBUTED======
        # One process per host downloads, the others wait for it.
        downloads = args.local_rank == 0
        # =====END:   ADDED FOR DISTRIBUTED======
        if downloads:
            MNIST(args.data_dir, download=True)
        # =====START: ADDED FOR DISTRIBUTED======
        if job.backend != "none":
            dist.barrier()
        # =====END:   ADDED FOR DISTRIBUTED======
    splits = []
    for train in (True, False):
        mnist = MNIST(args.data_dir, train=train)
        images = (mnist.data.unsqueeze(1).to(torch.float32) / 255 - 0.1307) / 0.3081
        splits.append(Split(images, mnist.targets))
    return splits[0], splits[1]


class Net(nn.Module):
    """Two convolutions and two linear layers for square one-channel images [N, 1, H, H].

    All layers are smooth. At the kink of a ReLU or a max-pooling, a difference in the last bit
    selects another gradient, and two runs with different rounding then diverge.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1)
        self.fc1 = nn.Linear(64 * ((size + 1) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        x = F.gelu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def shift(images: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Move each image [N, 1, H, H] down and right by its own offsets [N, 2] in -1..1."""
    padded = F.pad(images, (1, 1, 1, 1))
    pixel = torch.arange(images.shape[-1], device=images.device)
    rows = 1 - offsets[:, 0, None] + pixel
    columns = 1 - offsets[:, 1, None] + pixel
    sample = torch.arange(len(images), device=images.device)
    return padded[sample[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Split,
    args: argparse.Namespace,
    epoch: int,
    job: Job,
) -> list[float]:
    """Train on every sample once. Returns each step's mean loss over the global batch."""
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = args.lr * args.gamma ** (epoch - 1)
    # The same order and shifts on every rank, for any number of ranks, and regardless of whether
    # this process trained the earlier epochs.
    generator = torch.Generator().manual_seed(args.seed + epoch)
    count = len(train.labels)
    order = torch.randperm(count, generator=generator).to(job.device)
    offsets = torch.randint(-1, 2, (count, 2), generator=generator).to(job.device)
    batches = order.split(args.batch_size)
    loss_sums = torch.zeros(len(batches), dtype=torch.float64, device=job.device)
    title = f"epoch {epoch}/{args.epochs}"
    for step, batch in enumerate(support.progress(batches, title, job.rank)):
        samples = batch
        # =====START: ADDED FOR DISTRIBUTED======
        samples = batch.tensor_split(job.world_size)[job.rank]
        # =====END:   ADDED FOR DISTRIBUTED======
        output = model(shift(train.images[samples], offsets[samples]))
        loss_sum = F.cross_entropy(output, train.labels[samples], reduction="sum")
        loss = loss_sum / len(batch)
        # =====START: ADDED FOR DISTRIBUTED======
        # DDP averages the ranks' gradients. With this factor, they add up to the gradient of the
        # global batch's mean loss, even if the ranks' slices differ in size.
        loss = loss * job.world_size
        # =====END:   ADDED FOR DISTRIBUTED======
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sums[step] = loss_sum.detach()
    # =====START: ADDED FOR DISTRIBUTED======
    if job.backend != "none":
        dist.all_reduce(loss_sums)
    # =====END:   ADDED FOR DISTRIBUTED======
    return [total / len(batch) for total, batch in zip(loss_sums.tolist(), batches, strict=True)]


@torch.no_grad()
def count_correct(model: nn.Module, test: Split, args: argparse.Namespace, job: Job) -> int:
    """The number of test samples that are classified correctly. Each sample is on one rank."""
    model.eval()
    images, labels = test
    # =====START: ADDED FOR DISTRIBUTED======
    images = images.tensor_split(job.world_size)[job.rank]
    labels = labels.tensor_split(job.world_size)[job.rank]
    # =====END:   ADDED FOR DISTRIBUTED======
    counts = torch.zeros(2, dtype=torch.int64, device=job.device)  # correct, seen
    size = args.test_batch_size
    for x, y in zip(images.split(size), labels.split(size), strict=True):
        counts[0] += (model(x).argmax(dim=1) == y).sum()
        counts[1] += len(y)
    # =====START: ADDED FOR DISTRIBUTED======
    if job.backend != "none":
        dist.all_reduce(counts)
    # =====END:   ADDED FOR DISTRIBUTED======
    correct, seen = counts.tolist()
    if seen != len(test.labels):
        raise RuntimeError(f"{seen} test samples were counted instead of {len(test.labels)}")
    return correct


def save_checkpoint(
    path: Path, net: Net, optimizer: torch.optim.Optimizer, args: argparse.Namespace, epoch: int
) -> None:
    """Write the state after `epoch`."""
    state = {
        "epoch": epoch,
        "settings": {name: getattr(args, name) for name in RESUMED_SETTINGS},
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    support.save_checkpoint(path, state)


def load_checkpoint(
    path: Path,
    net: Net,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
    device: torch.device,
) -> int:
    """Restore the state of `save_checkpoint`. Returns the number of trained epochs."""
    settings = {name: getattr(args, name) for name in RESUMED_SETTINGS}
    state = support.read_checkpoint(path, device, settings)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


# =====START: ADDED FOR DISTRIBUTED======
def check_ranks_agree(net: Net, job: Job) -> str:
    """Compare a digest of all parameters over all ranks. Returns the result, or fails on all."""
    if job.backend == "none":
        return "1 process"
    sha = hashlib.sha256()
    for parameter in net.parameters():
        sha.update(parameter.detach().cpu().numpy().tobytes())
    digest = torch.tensor(list(sha.digest()), dtype=torch.uint8, device=job.device)
    digests = [torch.empty_like(digest) for _ in range(job.world_size)]
    dist.all_gather(digests, digest)
    differing = [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
    if differing:
        raise RuntimeError(f"the parameters of ranks {differing} differ from those of rank 0")
    return f"{job.world_size} ranks ({job.backend}), parameters bitwise equal"


# =====END:   ADDED FOR DISTRIBUTED======


def run(args: argparse.Namespace, job: Job) -> None:
    train, test = load_data(args, job)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True
    net = Net(size=train.images.shape[-1]).to(job.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=args.momentum)
    done = 0
    if args.resume is not None:
        done = load_checkpoint(args.resume, net, optimizer, args, job.device)
    model: nn.Module = net
    # =====START: ADDED FOR DISTRIBUTED======
    # Wrap last: the wrapper broadcasts rank 0's parameters, so that all ranks start equal.
    if job.backend != "none":
        model = DDP(net)
    # =====END:   ADDED FOR DISTRIBUTED======

    losses: list[float] = []
    seconds = 0.0
    correct = count_correct(model, test, args, job)
    for epoch in range(done + 1, args.epochs + 1):
        start = time.perf_counter()
        epoch_losses = train_epoch(model, optimizer, train, args, epoch, job)
        seconds += time.perf_counter() - start
        losses += epoch_losses
        correct = count_correct(model, test, args, job)
        if job.rank == 0:
            mean_loss = sum(epoch_losses) / len(epoch_losses)
            accuracy = 100 * correct / len(test.labels)
            print(
                f"epoch {epoch}/{args.epochs}: loss {mean_loss:.4f}, "
                f"test accuracy {accuracy:.2f} % ({correct} of {len(test.labels)})",
                flush=True,
            )
            if args.save is not None:
                save_checkpoint(args.save, net, optimizer, args, epoch)

    agreement = check_ranks_agree(net, job)
    if job.rank == 0:
        if args.loss_log is not None:
            log = {"world_size": job.world_size, "epochs_before": done, "losses": losses}
            args.loss_log.write_text(json.dumps(log))
        samples = (args.epochs - done) * len(train.labels) if losses else 0
        speed = f"{samples / seconds:.0f} samples/s" if losses else "nothing left to train"
        print(
            f"final: test accuracy {100 * correct / len(test.labels):.2f} %, "
            f"trained {seconds:.1f} s, {speed}, {agreement}",
            flush=True,
        )


def main() -> None:
    args = parse_args()
    try:
        run(args, start_job(args))
    finally:
        # =====START: ADDED FOR DISTRIBUTED======
        if dist.is_initialized():
            dist.destroy_process_group()
        # =====END:   ADDED FOR DISTRIBUTED======


if __name__ == "__main__":
    main()
