"""Random batch-norm programs: a SyncBatchNorm that is trained and evaluated for some steps on one
or several ranks, against one process in float64, and on one rank against torch's batch norm.

A program is a module (channels, dtypes, options, strides of its tensors) and steps. A step has a
mode, a batch per rank (uneven, empty), the memory of each tensor, and derivatives: of which inputs,
by ``backward()`` or by ``torch.autograd.grad``, and in float64 maybe second ones. Every rank draws
the batch of all ranks and keeps its part. After each step output, gradients, running statistics and
counter are compared.

``python python/tests/batch_norm_programs.py --seeds 0:3000``
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from ddp_support import RankPool, RanksFailed

BATCH = 50
BATCH_TIMEOUT_S = 240
MAX_ELEMENTS = 8000
EPS = 1e-3
MEMORY = ("contiguous", "contiguous", "channels_last", "transposed", "sliced", "offset",
          "expanded")  # fmt: skip


@dataclass
class Step:
    sizes: list[int]  # of the ranks
    training: bool = True
    how: str = "grad"  # or backward, no_grad, inference: how it is differentiated, if at all
    wanted: str = "xzwb"  # of x, z, weight and bias: what derivatives are asked for, if it is there
    frozen: str = ""  # what needs no gradient
    second: bool = False
    add: bool = False
    memory: dict[str, str] = field(default_factory=dict)  # of x, z and dy
    offset: float = 0.0  # mean of the batch
    sabotage: bool = False  # to see that it is found: the output is wrong


@dataclass
class Program:
    seed: int
    world: int
    channels: int
    spatial: list[int]
    dtype: torch.dtype
    steps: list[Step]
    parameter_dtype: torch.dtype = torch.float32
    channel_last: bool = False
    relu: bool = False
    affine: bool = True
    track: bool = True
    momentum: float | None = 0.1
    strided: bool = False  # parameters and buffers
    counter: torch.dtype | None = torch.int64


# --- drawing ---


def draw_step(rng: random.Random, world: int) -> Step:
    sizes = [rng.choice([0, 1, 1, 2, 3, 4, 7]) for _ in range(world)]
    return Step(
        sizes,
        rng.random() < 0.7,
        rng.choice(["grad", "grad", "grad", "backward", "backward", "no_grad", "inference"]),
        "".join(rng.sample("xzwb", rng.randint(1, 4))),
        "".join(name for name in "xzwb" if rng.random() < 0.15),
        rng.random() < 0.5,
        rng.random() < 0.4,
        {name: rng.choice(MEMORY) for name in ("x", "z", "dy")},  # expanded, if all are the same
        rng.choice([0.0, 1.0, 100.0]),
    )


def draw_program(seed: int, world: int | None = None) -> Program:
    rng = random.Random(seed)
    world = world or rng.choice([1, 2, 2, 3])
    spatial = [rng.choice([1, 2, 3, 5, 8, 17]) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
    channels = rng.choice([1, 2, 3, 7, 16, 33, 64])
    steps = [draw_step(rng, world) for _ in range(rng.randint(1, 4))]
    while math.prod(spatial) * channels * max(sum(s.sizes) for s in steps) > MAX_ELEMENTS:
        spatial[spatial.index(max(spatial))] //= 2
    dtype = rng.choice([torch.float64, torch.float64, torch.float32, torch.float16, torch.bfloat16])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Program(
        seed, world, channels, spatial, dtype, steps, rng.choice([wide, wide, dtype]),
        rng.random() < 0.3, rng.random() < 0.4, rng.random() < 0.8, rng.random() < 0.8,
        rng.choice([None, 0.1, 0.1, 0.3, 0.0, 1.0]), rng.random() < 0.2,
        rng.choice([torch.int64, torch.int64, torch.int32, torch.float32, None]),
    )  # fmt: skip


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    for i in range(len(program.steps)):
        if len(program.steps) > 1:
            yield replace(program, steps=program.steps[:i] + program.steps[i + 1 :])
        step = program.steps[i]
        for name, value in vars(Step(step.sizes)).items():
            if getattr(step, name) != value:
                steps = copy.copy(program.steps)
                steps[i] = replace(step, **{name: value})
                yield replace(program, steps=steps)
    plain = Program(program.seed, program.world, 1, [], program.dtype, program.steps)
    for name, value in vars(plain).items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})


# --- running many ---


def run(pool: RankPool, programs: list[Program]) -> str:
    """What is wrong with the first that fails; empty if nothing is."""
    from batch_norm_program_run import run_programs  # which imports this file

    try:
        pool.run(programs[0].world, run_programs, programs, timeout_s=BATCH_TIMEOUT_S)
    except RanksFailed as failed:
        return str(failed)
    return ""


def run_range(
    pool: RankPool, programs: list[Program], found: Callable[[Program, str], None]
) -> None:
    """Runs all, in batches of one world size; ``found`` is told of each that fails."""
    for world in sorted({program.world for program in programs}):
        todo = [program for program in programs if program.world == world]
        while todo:
            batch, todo = todo[:BATCH], todo[BATCH:]
            message = run(pool, batch)
            if message:
                seeds = [int(seed) for seed in re.findall(r"program of seed (\d+)", message)]
                at = next(i for i, program in enumerate(batch) if program.seed in seeds)
                found(batch[at], message)
                todo = batch[at + 1 :] + todo


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 60) -> Program:
    """The smallest program found that still fails."""
    for less in smaller(program):
        if tries <= 0:
            break
        tries -= 1
        if fails(less):
            return shrink(less, fails, tries)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="A:B, or one seed")
    parser.add_argument("--world", type=int, choices=(1, 2, 3))
    parser.add_argument("--no-shrink", action="store_true")
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    failures = 0

    with RankPool(3) as pool:

        def found(program: Program, message: str) -> None:
            nonlocal failures
            failures += 1
            print(f"seed {program.seed} fails: {message[-3000:]}", flush=True)
            if not arguments.no_shrink:
                small = shrink(program, lambda less: bool(run(pool, [less])))
                print(f"smallest:\n{small}\n{run(pool, [small])[-1500:]}", flush=True)

        begin = time.monotonic()
        for start in range(seeds.start, seeds.stop, 5 * BATCH):
            part = range(start, min(start + 5 * BATCH, seeds.stop))
            run_range(pool, [draw_program(seed, arguments.world) for seed in part], found)
            took = time.monotonic() - begin
            print(f"to seed {part.stop}: {failures} failures, {took:.0f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
