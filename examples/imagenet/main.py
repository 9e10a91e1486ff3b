# SPDX-License-Identifier: BSD-3-Clause
"""Train a ResNet on ImageNet, or on synthetic images, in mixed precision on one GPU or many.

python main.py --synthetic 1000
python main.py --opt-level O2 /data/imagenet
python -m apex.parallel.multiproc main.py --opt-level O1 --sync_bn /data/imagenet
torchrun --nproc_per_node=8 main.py --opt-level O2 --channels-last /data/imagenet
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from apex import amp
from apex.parallel import DistributedDataParallel as DDP

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support
import images
import resnet

WARMUP_EPOCHS = 5
# Settings that must not change when a run resumes from a checkpoint.
RESUMED_SETTINGS = ("arch", "opt_level", "sync_bn")


class Job(NamedTuple):
    """The place of this process in the job."""

    rank: int
    world_size: int
    device: torch.device


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="ResNets in mixed precision on one GPU or many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "data", type=Path, nargs="?", help="folder with train/CLASS/ and val/CLASS/ of images"
    )
    parser.add_argument(
        "--synthetic", type=int, metavar="N", help="train on N synthetic images instead"
    )
    parser.add_argument(
        "--num-classes", type=int, default=10, metavar="N", help="of synthetic images"
    )
    parser.add_argument("--image-size", type=int, default=224, metavar="N", help="height and width")
    parser.add_argument("-a", "--arch", default="resnet18", metavar="NAME", help="of the network")
    parser.add_argument(
        "-j",
        "--workers",
        type=int,
        default=min(4, len(os.sched_getaffinity(0))),
        metavar="N",
        help="loader processes per rank; by default up to 4, as there are cores",
    )
    parser.add_argument("--epochs", type=int, default=90, metavar="N", help="in all")
    parser.add_argument(
        "-b", "--batch-size", type=int, default=256, metavar="N", help="images per rank"
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=0.1,
        help="learning rate for steps of 256 images; scaled with the images of a step",
    )
    parser.add_argument("--momentum", type=float, default=0.9, metavar="M", help="of SGD")
    parser.add_argument("--weight-decay", type=float, default=1e-4, metavar="W", help="of SGD")
    parser.add_argument("--steps", type=int, metavar="N", help="end every epoch after N steps")
    parser.add_argument(
        "-p", "--print-freq", type=int, default=10, metavar="N", help="print every N steps"
    )
    support.add_checkpoint_options(parser)
    parser.add_argument("-e", "--evaluate", action="store_true", help="only evaluate")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation")
    parser.add_argument(
        "--deterministic", action="store_true", help="choose kernels that repeat their bits"
    )
    parser.add_argument(
        "--sync_bn", "--sync-bn", action="store_true", help="batch norm over all ranks"
    )
    parser.add_argument(
        "--opt-level", choices=("O0", "O1", "O2", "O3"), default="O1", help="of apex.amp"
    )
    parser.add_argument(
        "--keep-batchnorm-fp32", choices=("True", "False"), help="instead of the level's choice"
    )
    parser.add_argument(
        "--loss-scale",
        type=loss_scale,
        metavar="S",
        help="a number or 'dynamic', instead of the level's choice",
    )
    parser.add_argument("--channels-last", action="store_true", help="memory layout NHWC")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even with a GPU")
    support.add_local_rank(parser)
    args = parser.parse_args(argv)
    if args.opt_level == "O1" and args.keep_batchnorm_fp32 is not None:
        parser.error("--keep-batchnorm-fp32 is for O2 and O3: O1 leaves batch norm in float32")
    return args


def loss_scale(text: str) -> float | str:
    return text if text == "dynamic" else float(text)


def start_job(args: argparse.Namespace) -> Job:
    """Choose the device and join the other processes. A single process is a job of its own."""
    support.launch_alone_unless_launched()
    device = support.choose_device(args.local_rank, use_cuda=not args.no_cuda)
    torch.backends.cudnn.benchmark = not args.deterministic
    torch.backends.cudnn.deterministic = args.deterministic
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method="env://")
    return Job(dist.get_rank(), dist.get_world_size(), device)


def build_network(args: argparse.Namespace, num_classes: int) -> nn.Module:
    """A ResNet by name: from torchvision, or from resnet.py if torchvision is not installed."""
    try:
        from torchvision.models import get_model, list_models
    except ImportError:
        known, build = list(resnet.LAYOUTS), resnet.build
    else:
        known = [name for name in list_models() if name.startswith(("resne", "wide_resnet"))]
        build = get_model
    if args.arch not in known:
        support.fail(f"there is no network --arch {args.arch}, only {', '.join(known)}.")
    return build(args.arch, num_classes=num_classes)


def make_loader(dataset: torch.utils.data.Dataset, train: bool, args: argparse.Namespace, job: Job):
    """Batches of this rank's share, [N, 3, H, W] and [N]. Incomplete ones are dropped in
    training."""
    sampler = DistributedSampler(
        dataset, num_replicas=job.world_size, rank=job.rank, shuffle=train, seed=args.seed
    )
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=job.device.type == "cuda",
        drop_last=train,
    )


def run(args: argparse.Namespace, job: Job) -> None:
    torch.manual_seed(args.seed)
    data = images.load(args)
    model = build_network(args, data.num_classes)
    if args.sync_bn:
        import apex

        model = apex.parallel.convert_syncbn_model(model)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(job.device, memory_format=layout)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    # amp first sets the dtypes of the parameters. Then the checkpoint is loaded through amp. DDP
    # comes last, because it needs the final parameters.
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
        verbosity=0,
    )
    done, best = 0, 0.0
    if args.resume is not None:
        done, best = load_checkpoint(model, optimizer, args, job)
    ddp = DDP(model)

    loader = make_loader(data.train, True, args, job)
    val_loader = make_loader(data.val, False, args, job)
    if args.evaluate:
        report_accuracy(evaluate(model, val_loader, layout, job), "evaluated", job)
        return
    for epoch in range(done, args.epochs):
        train_epoch(ddp, optimizer, loader, layout, epoch, args, job)
        accuracy = evaluate(model, val_loader, layout, job)
        best = max(best, accuracy[0])
        report_accuracy(accuracy, f"epoch {epoch + 1}/{args.epochs}", job)
        if job.rank == 0 and args.checkpoint is not None:
            save_checkpoint(model, optimizer, epoch + 1, best, args)
    if job.rank == 0:
        print(f"final: best top-1 accuracy {best:.2f} %, {job.world_size} rank(s)", flush=True)


def set_learning_rate(
    optimizer: torch.optim.Optimizer,
    epoch: int,
    fraction: float,
    args: argparse.Namespace,
    job: Job,
) -> None:
    """Linear warm-up, then a tenth at epochs 30, 60 and 80, scaled by the images per step.

    Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 2.

    Args:
        optimizer: the optimizer whose learning rates are set.
        epoch: from 0.
        fraction: the completed part of this epoch, 0 to 1.
        args: the command line.
        job: provides the number of ranks.
    """
    lr = args.lr * args.batch_size * job.world_size / 256
    lr *= 0.1 ** sum(epoch >= milestone for milestone in (30, 60, 80))
    lr *= min(1.0, (epoch + fraction) / WARMUP_EPOCHS + 1e-3)
    for group in optimizer.param_groups:
        group["lr"] = lr


def train_epoch(
    ddp: DDP,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    layout: torch.memory_format,
    epoch: int,
    args: argparse.Namespace,
    job: Job,
) -> None:
    """One pass over this rank's share, or --steps steps. Rank 0 prints losses and throughput."""
    ddp.train()
    loader.sampler.set_epoch(epoch)
    # The augmentation of an epoch does not depend on whether this process trained earlier epochs.
    torch.manual_seed(args.seed + 1_000_003 * (epoch * job.world_size + job.rank))
    steps = min(len(loader), args.steps or len(loader))
    title = f"epoch {epoch + 1}/{args.epochs}"
    losses = torch.zeros((), device=job.device)
    since, counted = time.perf_counter(), 0
    bar = support.progress(None, title, job.rank, total=steps)
    for step, (x, labels) in zip(range(steps), loader, strict=False):
        set_learning_rate(optimizer, epoch, step / steps, args, job)
        x = x.to(job.device, non_blocking=True, memory_format=layout)
        labels = labels.to(job.device, non_blocking=True)
        loss = F.cross_entropy(ddp(x), labels)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses += loss.detach()
        counted += 1
        bar.update()
        if counted == args.print_freq or step + 1 == steps:
            # Only here the host waits for the GPU, so the time covers finished steps.
            dist.all_reduce(losses)
            mean = losses.item() / counted / job.world_size
            seconds = (time.perf_counter() - since) / counted
            speed = args.batch_size * job.world_size / seconds
            if job.rank == 0:
                bar.write(
                    f"{title}, step {step + 1}/{steps}: loss {mean:.4f}, "
                    f"{1000 * seconds:.1f} ms per step, {speed:.1f} images/s",
                    file=sys.stdout,
                )
                sys.stdout.flush()
            losses.zero_()
            since, counted = time.perf_counter(), 0
    bar.close()


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader, layout: torch.memory_format, job: Job
) -> tuple[float, float]:
    """Top-1 and top-5 accuracy in percent over all ranks, the same on every rank.

    It is that of the checkpoint, which has rank 0's running statistics: without --sync_bn each rank
    has its own. If the images do not divide evenly, the sampler repeats some, which then count
    twice.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    model.eval()
    counts = torch.zeros(3, dtype=torch.float64, device=job.device)  # top-1, top-5, seen
    for x, labels in support.progress(loader, "validation", job.rank):
        output = model(x.to(job.device, non_blocking=True, memory_format=layout))
        best = output.topk(min(5, output.shape[1]), dim=1).indices
        right = best == labels.to(job.device, non_blocking=True)[:, None]
        counts[0] += right[:, 0].sum()
        counts[1] += right.any(dim=1).sum()
        counts[2] += len(labels)
    dist.all_reduce(counts)
    first, five, seen = counts.tolist()
    return 100 * first / seen, 100 * five / seen


def report_accuracy(accuracy: tuple[float, float], title: str, job: Job) -> None:
    if job.rank == 0:
        print(f"{title}: top-1 {accuracy[0]:.2f} %, top-5 {accuracy[1]:.2f} %", flush=True)


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    best: float,
    args: argparse.Namespace,
) -> None:
    """Write the state after `epoch` epochs. Rank 0 only."""
    state = {
        "epoch": epoch,
        "best": best,
        "settings": {name: getattr(args, name) for name in RESUMED_SETTINGS},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
    }
    support.save_checkpoint(args.checkpoint, state)


def load_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, job: Job
) -> tuple[int, float]:
    """Restore the state of `save_checkpoint`. Returns the trained epochs and the best accuracy."""
    settings = {name: getattr(args, name) for name in RESUMED_SETTINGS}
    state = support.read_checkpoint(args.resume, job.device, settings)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    return state["epoch"], state["best"]


def main() -> None:
    args = parse_args()
    try:
        run(args, start_job(args))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
