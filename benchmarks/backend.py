# SPDX-License-Identifier: BSD-3-Clause
"""Compares collectives of torch.distributed over the backend ``apex`` and over Gloo.

    python benchmarks/backend.py [--ranks 2 4] [--sizes KIB ...] [--only all_reduce ...]

The backends take turns. The size is that of a rank's largest tensor: the tensor that it reduces, or
the result of a gather. The time is per call, averaged over several calls in a row, on the slowest
rank. ``ratio`` is the median of apex's time divided by Gloo's of the same turn. Writes
``backend.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor

import apex  # noqa: F401  # registers the backend

SIZES_KIB = [1, 4, 64, 1024, 16384, 48128, 262144]
TITLES = {"gloo": "Gloo", "apex": "apex"}
ROUNDS = 15


def collectives(numel: int, group: Any) -> dict[str, Callable[[], Any]]:
    world = dist.get_world_size()
    share = max(1, numel // world)
    whole, part = torch.ones(share * world), torch.ones(share)
    parts: list[Tensor] = list(torch.empty_like(whole).chunk(world))
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda: dist.all_gather(parts, part, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }


def measure(sizes: list[int], only: list[str]) -> list[dict[str, Any]]:
    """A row for each kind and size. Collective."""
    turns = harness.Turns("cpu")
    by_name = {name: dist.new_group(backend=name) for name in TITLES}
    rows = []
    for kind in only:
        for kib in sizes if kind != "barrier" else sizes[:1]:
            calls = max(1, min(100, 4096 // kib))
            bodies = []
            for group in by_name.values():
                one = collectives(kib * 256, group)[kind]
                bodies.append(lambda one=one, calls=calls: [one() for _ in range(calls)])
            for body in bodies:
                body()
            times = dict(zip(by_name, turns.take(bodies, rounds=ROUNDS, seconds=20.0), strict=True))
            row: dict[str, Any] = {"kind": kind, "kib": kib if kind != "barrier" else 0}
            for name, found in times.items():
                row[f"{name}_ms"] = harness.quartiles([t / calls * 1e3 for t in found])
            row["ratio"] = harness.ratios(times["apex"], times["gloo"])
            rows.append(row)
            if dist.get_rank() == 0:
                print(kind, kib, {name: f"{row[f'{name}_ms']['median']:.4f}" for name in by_name})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    head = ["collective", "KiB", *(f"{title}, ms" for title in TITLES.values())]
    return harness.table(
        [*head, "ratio to Gloo"],
        [
            [
                row["kind"],
                str(row["kib"]),
                *(f"{row[f'{name}_ms']['median']:.3f}" for name in TITLES),
                f"{row['ratio']['median']:.3f}",
            ]
            for row in rows
        ],
    )


def report(result: dict[str, Any]) -> str:
    """The tables of a result, one for each number of ranks."""
    return "\n".join(
        f"\n### Collectives of {world} ranks\n\n{table(rows)}\n"
        for world, rows in result["backend"].items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = [
        "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter",
        "barrier",
    ]  # fmt: skip
    parser.add_argument("--ranks", type=harness.positive_int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--sizes", type=harness.positive_int, nargs="+", default=SIZES_KIB, metavar="KIB"
    )
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--output", help="folder for backend.json (default: only print)")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": harness.machine(), "settings": {}, "backend": {}}
    harness.warn_if_busy(result["machine"])
    for world in args.ranks:
        result["backend"][world] = harness.run(
            measure, world, "gloo", "cpu", (args.sizes, args.only)
        )
    print(report(result))
    harness.write("backend", result, args.output)


if __name__ == "__main__":
    main()
