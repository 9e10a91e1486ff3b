# SPDX-License-Identifier: BSD-3-Clause
"""Compares SyncBatchNorm with torch.nn.BatchNorm2d and torch.nn.SyncBatchNorm.

One process:      python benchmarks/sync_batch_norm.py
Several ranks:    torchrun --nproc-per-node 2 benchmarks/sync_batch_norm.py
On a GPU:         python benchmarks/sync_batch_norm.py --device cuda

Measures forward plus backward of one layer. Variants are interleaved in every round. The result is
the first quartile of the rounds, because other programs may use the machine (--rounds sets the
number of rounds). The share of the copy bandwidth is the layer's minimum memory traffic (x read
twice and y written once, x and dy read twice and dx written once) per time, divided by the
bandwidth of a copy of the same tensor in the same rounds. More than 100 % is possible if a second
read hits a cache.

torch.nn.SyncBatchNorm does not accept CPU tensors, so its column is empty there. With several
ranks, the communication of a layer is also timed alone: an all-gather and an all-reduce of two
float64 values per channel, on a separate group. The CPU time of the training thread is also
measured; it excludes waiting for other ranks.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.parallel import SyncBatchNorm, create_syncbn_process_group

# The inputs of ResNet-50's batch norms: (channels, height = width), largest first.
RESNET50 = [(64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7),
            (2048, 7)]  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


@functools.cache
def own_group() -> dist.ProcessGroup | None:
    return create_syncbn_process_group(dist.get_world_size())


def collectives(channels: int, device: torch.device) -> Callable[[], None]:
    """The collectives of SyncBatchNorm in a forward and a backward, without computation."""
    record = torch.zeros(2 * channels + 1, dtype=torch.float64, device=device)
    records = record.new_zeros(dist.get_world_size() * record.numel())
    sums = torch.zeros(2 * channels, dtype=torch.float64, device=device)
    all_sums = sums.new_zeros(dist.get_world_size() * sums.numel())
    group = own_group()

    def exchange() -> None:
        dist.all_gather_into_tensor(records, record, group=group)
        if device.type == "cpu":
            dist.all_gather_into_tensor(all_sums, sums, group=group)
        else:
            dist.all_reduce(sums, group=group)

    return exchange


def measure(
    variants: dict[str, nn.Module],
    x: Tensor,
    dy: Tensor,
    rounds: int,
    others: dict[str, Callable[[], None]],
) -> tuple[dict[str, float], dict[str, float], float]:
    """Time forward plus backward of each variant, each call in `others`, and a copy of x. Returns
    seconds, CPU seconds of this thread, and the seconds of the copy."""
    target = torch.empty_like(x)
    source = x.detach()
    steps = dict(others)
    for name, module in variants.items():

        def step(module: nn.Module = module) -> None:
            module(x).backward(dy)
            x.grad = None

        steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    copies: list[float] = []
    for index in range(rounds + 3):
        start = clock(x.device)
        target.copy_(source)
        copied = clock(x.device) - start
        if index >= 3:
            copies.append(copied)
        for name, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            used, start = time.thread_time(), clock(x.device)
            step()
            taken, used = clock(x.device) - start, time.thread_time() - used
            if index >= 3:
                times[name].append(taken)
                processor[name].append(used)
    return (
        {name: quartile(values) for name, values in times.items()},
        {name: quartile(values) for name, values in processor.items()},
        quartile(copies),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=harness.positive_int, nargs="+", default=[32])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--layout", nargs="+", choices=["nchw", "nhwc"], default=["nchw", "nhwc"])
    parser.add_argument("--rounds", type=harness.positive_int, default=20)
    parser.add_argument(
        "--max-elements", type=harness.positive_int, default=1 << 25, help="skip larger inputs"
    )
    parser.add_argument("--threads", type=harness.positive_int, default=1, help="CPU threads")
    parser.add_argument("--output", help="folder for NAME.json (default: only print)")
    parser.add_argument("--name", default="sync-batch-norm", help="file name without suffix")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    if "RANK" in os.environ:
        dist.init_process_group()
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    described = harness.machine() | {"threads_per_rank": options.threads}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    result: dict[str, Any] = {
        "machine": described,
        "settings": {"ranks": ranks, "device": device.type, "rounds": options.rounds},
        "batch_norm": [],
    }
    if rank == 0:
        harness.warn_if_busy(described)
        print(
            f"# torch {torch.__version__}, {device.type}, {ranks} rank(s), "
            f"{options.threads} thread(s), {torch.backends.cpu.get_cpu_capability()}"
        )
        print(report([]))
    for batch in options.batch:
        for channels, side in RESNET50:
            shape = (batch, channels, side, side)
            if batch * channels * side * side > options.max_elements:
                continue
            for dtype_name in options.dtype:
                for layout in options.layout:
                    row = measure_row(shape, dtype_name, layout, device, options.rounds)
                    result["batch_norm"].append(row)
                    if rank == 0:
                        print(report([row]).splitlines()[-1], flush=True)
    if rank == 0:
        harness.write(options.name, result, options.output)
    if dist.is_initialized():
        dist.destroy_process_group()


def measure_row(
    shape: tuple[int, ...], dtype_name: str, layout: str, device: torch.device, rounds: int
) -> dict[str, Any]:
    x = torch.randn(shape, device=device).to(DTYPES[dtype_name])
    if layout == "nhwc":
        x = x.to(memory_format=torch.channels_last)
    dy = torch.randn_like(x)
    x.requires_grad_()
    variants: dict[str, nn.Module] = {
        "ours": SyncBatchNorm(shape[1], device=device),
        "plain": nn.BatchNorm2d(shape[1], device=device),
    }
    if device.type == "cuda" and dist.is_initialized():
        variants["torch"] = nn.SyncBatchNorm(shape[1], device=device)
    others = {}
    if dist.is_initialized():
        others["collectives"] = collectives(shape[1], device)
    seconds, processor, copy = measure(variants, x, dy, rounds, others)
    return {
        "input": list(shape),
        "dtype": dtype_name,
        "layout": layout,
        "seconds": seconds,
        "processor_seconds": processor,
        "copy_s": copy,
    }


def report(rows: list[dict[str, Any]]) -> str:
    """The table of these measurements."""
    lines = []
    synchronized = dist.is_initialized() or any("collectives" in row["seconds"] for row in rows)
    for row in rows:
        seconds = row["seconds"]
        ours, plain, peer = seconds["ours"], seconds["plain"], seconds.get("torch")
        alone = seconds.get("collectives")
        share = 8 * row["copy_s"] / 2 / ours  # eight passes over the tensor; a copy has two
        lines.append(
            [
                "×".join(map(str, row["input"])),
                row["dtype"],
                row["layout"],
                f"{ours * 1e3:.3f}",
                f"{plain * 1e3:.3f}",
                f"{ours / plain:.2f}",
                "" if peer is None else f"{peer * 1e3:.3f}",
                "" if peer is None else f"{ours / peer:.2f}",
                f"{share:.0%}",
            ]
        )
        if alone is not None:
            used = row["processor_seconds"]
            lines[-1] += [f"{alone * 1e3:.3f}", f"{used['ours'] / used['plain']:.2f}"]
    head = ["input", "dtype", "layout", "ours ms", "BatchNorm2d ms", "ratio",
            "torch SyncBatchNorm ms", "ratio", "share of copy bandwidth"]  # fmt: skip
    head += ["collectives alone, ms", "processor time, ratio"] * synchronized
    return harness.table(head, lines)


if __name__ == "__main__":
    main()
