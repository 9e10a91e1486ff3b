# SPDX-License-Identifier: BSD-3-Clause
"""Random batch-norm programs: a SyncBatchNorm that is trained and evaluated for some steps on one
or several ranks, against one process in float64.

A program consists of a module (channels, dtypes, options, strides of its tensors) and steps. A step
has a mode, a batch per rank (uneven or empty), the memory layout of each tensor, and derivatives:
with respect to which inputs, by ``backward()`` or ``torch.autograd.grad``, and in float64
optionally second ones. Every rank draws the batch of all ranks and keeps its slice. After each
step, output, gradients, running statistics and counter are compared.

``python python/tests/batch_norm_programs.py --seeds 0:3000``
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import random_programs
import torch
from ddp_support import RankPool, RanksFailed

BATCH_TIMEOUT_S = 240
MAX_ELEMENTS = 8000
LARGE = 100_000  # of one program in ten
EPS = 1e-3
MEMORY = ("contiguous", "contiguous", "channels_last", "transposed", "sliced", "offset",
          "expanded")  # fmt: skip


@dataclass
class Step:
    sizes: list[int]  # batch sizes by rank
    training: bool = True
    how: str = "grad"  # how it is differentiated: grad, backward, no_grad or inference
    wanted: str = "xzwb"  # derivatives with respect to x, z, weight and bias, where these exist
    frozen: str = ""  # inputs that need no gradient
    second: bool = False
    add: bool = False
    memory: dict[str, str] = field(default_factory=dict)  # layout of x, z and dy
    offset: float = 0.0  # mean of the batch
    sabotage: bool = False  # a test of the check: makes the output wrong


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
    strided: bool = False  # whether parameters and buffers are strided, on several ranks
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
    spatial = [rng.choice([1, 2, 3, 5, 8, 17, 33]) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
    channels = rng.choice([1, 2, 3, 7, 16, 33, 64, 130])
    steps = [draw_step(rng, world) for _ in range(rng.randint(1, 4))]
    most = LARGE if rng.random() < 0.1 else MAX_ELEMENTS
    while math.prod(spatial) * channels * max(sum(s.sizes) for s in steps) > most:
        spatial[spatial.index(max(spatial))] //= 2
    dtype = rng.choice([torch.float64, torch.float64, torch.float32, torch.float16, torch.bfloat16])
    for step in steps:  # torch's operators lose digits far from zero
        step.offset = step.offset if dtype == torch.float64 else min(step.offset, 1.0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # torch's own, which trains one rank, keeps statistics in 16 bits if no tensor is float32.
    narrow = wide if world == 1 else dtype
    track = rng.random() < 0.8 or dtype.itemsize == 2
    return Program(
        seed, world, channels, spatial, dtype, steps, rng.choice([wide, wide, narrow]),
        rng.random() < 0.3, rng.random() < 0.4, rng.random() < 0.8, track,
        rng.choice([None, 0.1, 0.1, 0.3, 0.0, 1.0]), world > 1 and rng.random() < 0.2,
        rng.choice([torch.int64, torch.int64, torch.int32, torch.float32, None]),
    )  # fmt: skip


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one element less."""
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
    """The failure of the first failing program; empty if none fails."""
    from batch_norm_program_run import run_programs  # it imports this file

    try:
        pool.run(programs[0].world, run_programs, programs, timeout_s=BATCH_TIMEOUT_S)
    except RanksFailed as failed:
        return str(failed)
    return ""


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest failing program that was found."""
    return random_programs.shrink(program, smaller, fails, tries=60)


def main() -> int:
    arguments = random_programs.arguments_of(__doc__, worlds=(1, 2, 3, 4)).parse_args()
    with RankPool(4) as pool:
        generator = random_programs.Generator(
            draw=lambda seed: draw_program(seed, arguments.world),
            run=lambda programs: run(pool, programs),
            smaller=smaller,
        )
        return random_programs.search(generator, arguments)


if __name__ == "__main__":
    sys.exit(main())
