"""One all-reduce between processes of one host: through shared memory, and through Gloo.

    python benchmarks/host_channel.py [--ranks 2 4] [--sizes KIB ...] [--output FOLDER]

Both ways take turns, call by call, with a barrier before each. A line is the median over calls, in
milliseconds, of rank 0's time and of its processor's; beside them a copy of as many bytes, which no
way can beat: ``share of copy`` is its time relative to that of the all-reduce in shared memory.
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
from torch import Tensor

from apex import _core

SIZES_KIB = [1, 4, 16, 64, 256, 1024, 4096, 8192, 48128, 131072, 262144]


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    dist.barrier()
    processor, begin = time.process_time(), time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3, (time.process_time() - processor) * 1e3


def copy_ms(tensor: Tensor, rounds: int) -> float:
    other = torch.empty_like(tensor)
    times = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        other.copy_(tensor)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def measure(kib: int, name: str) -> dict[str, float]:
    tensor = torch.ones(kib * 256)
    ways = {
        "gloo": lambda: dist.all_reduce(tensor),
        "shared": lambda: _core.all_reduce(tensor, name, True),
    }
    rounds = max(7, min(200, 60_000 // kib))
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for index in range(rounds + 2):
        for way, call in ways.items():
            tensor.fill_(1.0)
            result = timed(call)
            if index >= 2:
                found[way].append(result)
    row = {"kib": kib, "copy_ms": copy_ms(tensor, max(5, rounds // 4))}
    for way, times in found.items():
        row[f"{way}_ms"] = statistics.median(t for t, _ in times)
        row[f"{way}_processor_ms"] = statistics.median(p for _, p in times)
    row["ratio"] = row["shared_ms"] / row["gloo_ms"]
    row["share_of_copy"] = row["copy_ms"] / row["shared_ms"]
    return row


def run(rank: int, world: int, store: str, sizes: list[int], output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    rows = [measure(kib, name) for kib in sizes]
    if rank == 0:
        Path(output).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def report(result: dict[str, Any]) -> str:
    """The tables of a result, one for each number of ranks."""
    return "\n".join(
        f"\n### One all-reduce, {world} ranks\n\n{table(rows)}\n"
        for world, rows in result["all_reduce"].items()
    )


def table(rows: list[dict[str, float]]) -> str:
    lines = [
        "| KiB | Gloo, ms | its processor | shared memory, ms | its processor | ratio | a copy, ms "
        "| share of copy |",
        "| --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['kib']:.0f} | {row['gloo_ms']:.3f} | {row['gloo_processor_ms']:.3f} "
            f"| {row['shared_ms']:.3f} | {row['shared_processor_ms']:.3f} | {row['ratio']:.3f} "
            f"| {row['copy_ms']:.3f} | {row['share_of_copy']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=harness.positive_int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--sizes", type=harness.positive_int, nargs="+", default=SIZES_KIB, metavar="KIB"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": harness.machine(), "settings": {}, "all_reduce": {}}
    harness.warn_if_busy(result["machine"])
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows = f"{folder}/rows.json"
            mp.spawn(run, (world, f"{folder}/store", args.sizes, rows), world)
            result["all_reduce"][world] = json.loads(Path(rows).read_text())
    print(report(result))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "host_channel.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
