# SPDX-License-Identifier: BSD-3-Clause
"""Measures one all-reduce and one SyncBatchNorm between processes of one host.

    python benchmarks/host_channel.py [--ranks 2 4] [--sizes KIB ...] [--output FOLDER]

All-reduce: shared memory and Gloo take turns, with a barrier before each turn of several calls in a
row. A line shows the time and the CPU time of a call on rank 0, in milliseconds (medians over
turns), and the time to copy the same number of bytes on every rank. A tensor in the process's own
memory is copied to shared memory and back in parts, which takes as much memory traffic as the sum
itself. So ``share of copy``, the time of a copy relative to the all-reduce, cannot exceed one half.

SyncBatchNorm: forward and backward of 16 small layers, alternately with statistics over all ranks
and with statistics of each rank alone. The difference, per layer, is the cost of two collectives.
Writes ``host_channel.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from apex import _core
from apex.parallel import SyncBatchNorm, create_syncbn_process_group

CHANNELS = [16, 64, 256, 1024]
LAYERS = 16
LAYER_COLUMNS = ["alone_us", "all_us", "more_us"]
SIZES_KIB = [1, 4, 16, 64, 256, 1024, 4096, 8192, 48128, 131072, 262144]


def timed(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Milliseconds per call, and CPU milliseconds of this process, over this number of calls."""
    dist.barrier()
    processor, begin = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    elapsed, busy = time.perf_counter() - begin, time.process_time() - processor
    return elapsed / calls * 1e3, busy / calls * 1e3


def measure(kib: int, name: str) -> dict[str, float]:
    tensor = torch.zeros(kib * 256)
    other = torch.empty_like(tensor)
    ways: dict[str, Callable[[], Any]] = {
        "gloo": lambda: dist.all_reduce(tensor),
        "shared": lambda: _core.all_reduce(tensor, name),
        "copy": lambda: other.copy_(tensor),
    }
    calls = max(3, min(50, 4096 // kib))
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for index in range(33):
        for way, call in ways.items():
            result = timed(call, calls)
            if index >= 2:
                found[way].append(result)
    row: dict[str, float] = {"kib": kib}
    for way, times in found.items():
        row[f"{way}_ms"] = statistics.median(t for t, _ in times)
        row[f"{way}_processor_ms"] = statistics.median(p for _, p in times)
    row["ratio"] = row["shared_ms"] / row["gloo_ms"]
    row["share_of_copy"] = row["copy_ms"] / row["shared_ms"]
    return row


def batch_norm(channels: int) -> dict[str, float]:
    """Microseconds per layer, with all ranks and with each rank alone, on 4 x channels x 8 x 8."""
    groups = {"all": None, "alone": create_syncbn_process_group(1)}
    layers = {
        name: nn.Sequential(*[SyncBatchNorm(channels, process_group=group) for _ in range(LAYERS)])
        for name, group in groups.items()
    }
    x = torch.randn(4, channels, 8, 8, requires_grad=True)
    dy = torch.randn_like(x)
    times: dict[str, list[float]] = {name: [] for name in layers}
    for index in range(70):
        for name, layer in layers.items():
            elapsed, _ = timed(lambda layer=layer: layer(x).backward(dy), 5)
            if index >= 10:
                times[name].append(elapsed * 1e3 / LAYERS)
    row = {f"{name}_us": statistics.median(found) for name, found in times.items()}
    return {"channels": channels, **row, "more_us": row["all_us"] - row["alone_us"]}


def run(rank: int, world: int, store: str, sizes: list[int], output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    rows = [measure(kib, name) for kib in sizes]
    layers = [batch_norm(channels) for channels in CHANNELS]
    if rank == 0:
        Path(output).write_text(json.dumps({"all_reduce": rows, "batch_norm": layers}))
    dist.barrier()
    dist.destroy_process_group()


def report(result: dict[str, Any]) -> str:
    """The tables of a result, two for each number of ranks."""
    return "\n".join(
        f"\n### One all-reduce, {world} ranks\n\n{table(found['all_reduce'])}\n"
        f"\n### One SyncBatchNorm of 4 x C x 8 x 8, {world} ranks\n\n"
        f"{layer_table(found['batch_norm'])}\n"
        for world, found in result["host"].items()
    )


def layer_table(rows: list[dict[str, float]]) -> str:
    return harness.table(
        ["channels", "each rank alone, us", "over all ranks, us", "more, us"],
        [[f"{row['channels']:.0f}", *(f"{row[key]:.0f}" for key in LAYER_COLUMNS)] for row in rows],
    )


def table(rows: list[dict[str, float]]) -> str:
    head = ["KiB", "Gloo, ms", "its processor", "shared memory, ms", "its processor", "ratio",
            "a copy, ms", "share of copy"]  # fmt: skip
    keys = ["gloo_ms", "gloo_processor_ms", "shared_ms", "shared_processor_ms", "ratio", "copy_ms",
            "share_of_copy"]  # fmt: skip
    return harness.table(
        head, [[f"{row['kib']:.0f}", *(f"{row[key]:.3f}" for key in keys)] for row in rows]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=harness.positive_int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--sizes", type=harness.positive_int, nargs="+", default=SIZES_KIB, metavar="KIB"
    )
    parser.add_argument("--output", help="folder for host_channel.json (default: only print)")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": harness.machine(), "settings": {}, "host": {}}
    harness.warn_if_busy(result["machine"])
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows = f"{folder}/rows.json"
            mp.spawn(run, (world, f"{folder}/store", args.sizes, rows), world)
            result["host"][world] = json.loads(Path(rows).read_text())
    print(report(result))
    harness.write("host_channel", result, args.output)


if __name__ == "__main__":
    main()
