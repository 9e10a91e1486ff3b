# SPDX-License-Identifier: BSD-3-Clause
"""Random programs of collectives over the backend ``apex``, compared bitwise with a reference.

For hours: ``python python/tests/collective_programs.py --programs 5000 --ranks 3``. To repeat one
program: ``--seed 1234``.

Every rank knows the inputs of all ranks, so each computes the expected results: reductions in rank
order, float16 and bfloat16 in float32. No tolerance is used. Each rank waits for works in its own
order, or drops them. Ranks are delayed, and stopped (SIGSTOP) at random times.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_support import RankPool, RanksFailed, check
from torch import Tensor

Op = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OTHERS = (torch.complex64, torch.bool)
KINDS = (
    "all_reduce", "all_reduce", "all_reduce", "broadcast", "all_gather",
    "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all_single", "barrier", "objects", "send",
)  # fmt: skip
REDUCING = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
Check = Callable[[], None]


@functools.lru_cache(maxsize=1)
def groups_of(world: Any) -> list[Any]:
    """The world, all ranks again, and all ranks but the first. Created once per default group."""
    ranks = list(range(dist.get_world_size()))
    options: dict[str, Any] = {"backend": "apex", "timeout": datetime.timedelta(seconds=60)}
    made = [dist.new_group(ranks, **options), dist.new_group(ranks, **options)]
    return [*made, dist.new_group(ranks[1:], **options)]


def combined(inputs: list[Tensor], op: Any) -> Tensor:
    """The expected result on all ranks, bitwise."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    result = inputs[0].to(wide)
    for other in inputs[1:]:
        more = other.to(wide)
        if op in (Op.SUM, Op.AVG):
            result = result + more
        elif op == Op.PRODUCT:
            result = result * more
        elif op == Op.MAX:
            result = torch.maximum(result, more)
        elif op == Op.MIN:
            result = torch.minimum(result, more)
        elif op == Op.BAND:
            result = result & more
        elif op == Op.BOR:
            result = result | more
        else:
            result = result ^ more
    if op == Op.AVG:
        result = result / torch.full((), len(inputs), dtype=result.dtype)
    return result.to(dtype)


def value(key: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(hash(key) & 0x7FFFFFFF)
    if dtype in INTEGERS:
        return torch.randint(0, 7, shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def same(got: Tensor, wanted: Tensor, what: str) -> None:
    equal = got.shape == wanted.shape and got.dtype == wanted.dtype
    equal = equal and torch.equal(got.isnan(), wanted.isnan())
    check(equal and torch.equal(got.nan_to_num(0.0), wanted.nan_to_num(0.0)), what)


def draw_shape(draw: random.Random, large: bool) -> tuple[int, ...]:
    # at most 64 MiB, with 8 bytes per element
    numel = int(2 ** draw.uniform(0, 23 if large else 15)) - 1
    if draw.random() < 0.4:
        columns = draw.randint(1, 9)
        return (numel // columns + 1, columns)
    return (numel,)


class Program:
    """One program on one rank."""

    def __init__(self, seed: int, rank: int, groups: list[Any]) -> None:
        self.draw = random.Random(seed)
        self.own = random.Random(seed * 1009 + rank)  # for values that differ by rank
        self.seed, self.rank, self.groups = seed, rank, groups
        self.flying: list[tuple[Any, Check]] = []
        self.dropped: dict[int, list[Check]] = {}  # by group
        self.stops: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        for step in range(self.draw.randint(4, 16)):
            self.step(step)
            if self.draw.random() < 0.3:
                self.land()
        self.land()
        for stop in self.stops:
            stop.wait()

    def stop(self) -> None:
        """Stop this process briefly at a random time from now on."""
        sleeps = [self.own.uniform(0, 0.02) for _ in range(2)]
        deeds = f"sleep {sleeps[0]}; kill -STOP $PPID; sleep {sleeps[1]}; kill -CONT $PPID"
        self.stops.append(subprocess.Popen(["/bin/sh", "-c", deeds]))

    def land(self) -> None:
        """Wait for all works, in this rank's own order."""
        self.own.shuffle(self.flying)
        for work, looks in self.flying:
            way = self.own.random()
            if way < 0.3:
                work.get_future().wait()
            elif way < 0.4:
                while not work.is_completed():
                    time.sleep(0)
            work.wait()
            looks()
        self.flying.clear()
        # A dropped work is complete once a later work of its group is.
        for index in sorted(self.dropped):
            dist.barrier(self.groups[index])
            for looks in self.dropped[index]:
                looks()
        self.dropped.clear()

    def step(self, step: int) -> None:
        draw = self.draw
        kind = draw.choice(KINDS)
        index = draw.randrange(3)
        first = 1 if index == 2 else 0
        members = list(range(first, dist.get_world_size()))
        large, is_async = draw.random() < 0.05, draw.random() < 0.6
        drops = draw.random() < 0.1
        shape = draw_shape(draw, large)
        op = Op.SUM
        dtype = draw.choice(FLOATS + INTEGERS + OTHERS)
        if kind in REDUCING:
            dtype = draw.choice(FLOATS + INTEGERS)
            ops = [Op.SUM, Op.SUM, Op.MAX, Op.MIN, Op.PRODUCT]
            ops += [Op.AVG] if dtype in FLOATS else [Op.BAND, Op.BOR, Op.BXOR]
            op = draw.choice(ops)
        root = draw.choice(members)
        lengths = [[draw.randint(0, 300) for _ in members] for _ in members]
        if self.rank not in members:
            return
        if self.own.random() < 0.1:
            time.sleep(self.own.uniform(0, 0.01))
        if self.own.random() < 0.005:
            self.stop()
        me = members.index(self.rank)
        what = f"seed {self.seed}, step {step}: {kind} of {dtype} {list(shape)}, {op}"

        def of(rank: int, *more: Any) -> Tensor:
            return value((self.seed, step, rank, *more), shape, dtype)

        def own(*more: Any) -> Tensor:
            return of(self.rank, *more)

        group, options = self.groups[index], {"group": self.groups[index], "async_op": is_async}
        work: Any = None
        looks: Check
        if kind == "all_reduce":
            tensor = own()
            work = dist.all_reduce(tensor, op, **options)
            looks = lambda: same(tensor, combined([of(r) for r in members], op), what)  # noqa: E731
        elif kind == "broadcast":
            tensor = own()
            work = dist.broadcast(tensor, root, **options)
            looks = lambda: same(tensor, of(root), what)  # noqa: E731
        elif kind == "all_gather":
            outputs = [own() for _ in members]
            work = dist.all_gather(outputs, own(), **options)

            def looks() -> None:
                for rank, one in zip(members, outputs, strict=True):
                    same(one, of(rank), what)

        elif kind == "all_gather_into_tensor":
            output = torch.empty(len(members) * shape[0], *shape[1:], dtype=dtype)
            work = dist.all_gather_into_tensor(output, own(), **options)
            looks = lambda: same(output, torch.cat([of(r) for r in members]), what)  # noqa: E731
        elif kind == "reduce_scatter":
            output = own()
            work = dist.reduce_scatter(output, [own(r) for r in members], op, **options)
            looks = lambda: same(  # noqa: E731
                output, combined([of(r, self.rank) for r in members], op), what
            )
        elif kind == "reduce_scatter_tensor":
            output = torch.empty(shape, dtype=dtype)
            inputs = torch.cat([of(self.rank, r) for r in members])
            work = dist.reduce_scatter_tensor(output, inputs, op, **options)
            looks = lambda: same(  # noqa: E731
                output, combined([of(r, self.rank) for r in members], op), what
            )
        elif kind == "all_to_all_single":  # by Gloo, whose works are not in the order of the others
            drops, dtype = False, torch.float32

            def part(source: int, to: int) -> Tensor:
                key = (self.seed, step, source, to)
                return value(key, (lengths[source][to],), dtype)

            sizes = [lengths[source][me] for source in range(len(members))]
            parts = torch.cat([part(me, to) for to in range(len(members))])
            output = torch.empty(sum(sizes), dtype=dtype)
            work = dist.all_to_all_single(output, parts, sizes, lengths[me], **options)

            def looks() -> None:
                for source, one in enumerate(output.split(sizes)):
                    same(one, part(source, me), what)

        elif kind == "barrier":
            work = dist.barrier(**options)
            looks = lambda: None  # noqa: E731
        elif kind == "objects":
            objects: list[Any] = [None] * len(members)
            dist.all_gather_object(objects, {"rank": self.rank, "step": step}, group=group)
            check(objects == [{"rank": r, "step": step} for r in members], what)
            return
        else:
            after, before = members[(me + 1) % len(members)], members[me - 1]
            if after == self.rank:
                return
            tensor = torch.empty(shape, dtype=torch.float32)
            sent_work = dist.isend(torch.full(shape, float(self.rank)), after, group=group)
            dist.recv(tensor, before, group=group)
            sent_work.wait()
            same(tensor, torch.full(shape, float(before)), what)
            return
        if work is None:
            looks()
        elif drops and hasattr(work, "get_future"):
            self.dropped.setdefault(index, []).append(looks)
        else:
            self.flying.append((work, looks))


def run_programs(rank: int, world: int, seeds: list[int]) -> None:
    groups = groups_of(dist.group.WORLD)
    for seed in seeds:
        Program(seed, rank, groups).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, help="run this program only")
    arguments = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 31)
    last = first + arguments.programs
    if arguments.seed is not None:
        first, last = arguments.seed, arguments.seed + 1
    print(f"programs from seed {first} on", flush=True)
    begin = time.monotonic()
    with RankPool(arguments.ranks) as pool:
        for begin_seed in range(first, last, 100):
            seeds = list(range(begin_seed, min(last, begin_seed + 100)))
            try:
                pool.run(arguments.ranks, run_programs, seeds)
            except RanksFailed as failure:
                print(failure)
                return 1
            done = seeds[-1] + 1 - first
            if done % 500 == 0 or math.isclose(done, last - first):
                print(f"{done} programs in {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
