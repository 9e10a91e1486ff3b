# SPDX-License-Identifier: BSD-3-Clause
"""Draws, runs and shrinks random training programs with amp.

``python python/tests/amp_programs.py --seeds 0:3000`` runs a range, prints the seed of each failure
and the smallest program that still fails. What is run and checked is in amp_program_run.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import random_programs
from amp_program_run import DISCARDS, LEVELS, LOSSES, OPTIMIZERS, PLAIN, Program, Step, run_programs
from ddp_support import RankPool, RanksFailed

BATCH = 25
BATCH_TIMEOUT_S = 300
WRAPPERS = ("apex", "apex, views", "torch")
#: Optimizers that accept torch.amp.GradScaler's flag as a tensor. Copies of torch's do not.
FUSED = tuple(name for name in OPTIMIZERS if name.startswith("Fused"))


def draw_program(seed: int) -> Program:
    rng = random.Random(seed)
    level, name = rng.choice(list(LEVELS)), rng.choice(list(OPTIMIZERS))
    wrapper = rng.choice(WRAPPERS) if rng.random() < 0.4 else ""
    plain, fp16 = level in PLAIN, level == "FP16_Optimizer"
    scale = rng.choice([None, None, 8.0, "dynamic"])
    if plain:
        # GradScaler cannot unscale float16 gradients. Only optimizers that do it themselves allow
        # them.
        scale = rng.choice([None, "dynamic"] if level != "float16" or name in FUSED else [None])
    count = 1 if fp16 else rng.choice([1, 1, 2])
    dynamic = scale == "dynamic" or (scale is None and level in ("O1", "O2"))
    # At O2, the master weights are in the optimizer's state, which must be loaded afterwards.
    orders = ["model first", "optimizer first"] + ["before initialize"] * ("O2" not in level)
    often_skips_first = rng.random() < 0.3

    def neutral(parts: int) -> dict[str, Any]:
        drawn = {
            "restore": rng.choice(orders),
            "evaluate": True,
            "discard": (rng.choice([False, True]), rng.choice(DISCARDS)),
            "raises": rng.randrange(parts),
            "forward": True,
        }
        kept = {key: value for key, value in drawn.items() if rng.random() < 0.25}
        # Without master weights, float16 gradients near 0 lose bits when they are scaled again.
        if plain or fp16 or (level == "O3" and "small" in name):
            kept.pop("raises", None)
        return kept

    def step(number: int) -> Step:
        rate = 0.8 if often_skips_first and number < 2 else 0.1
        parts = [
            {
                "loss": rng.randrange(LOSSES),
                "delay": rng.random() < 0.3,
                "overflow": dynamic and rng.random() < rate,
            }
            for _ in range(rng.choice([1, 1, 2, 3]))
        ]
        parts[-1]["delay"] = False
        skipped = any(part["overflow"] for part in parts)
        return Step(
            parts,
            rng.choice(["", "", "", "before", "late"]),
            rng.choice(["data", "numpy", "in place", "assign"]),
            rng.random() < 0.2 and not plain,
            rng.random() < 0.5,
            rng.random() < 0.3,
            1 + (rng.random() < 0.2 and not skipped and not (plain and dynamic)),
            neutral(len(parts)),
        )

    return Program(seed, level, name, count, wrapper, scale, [step(i) for i in range(5)])


def run(pool: RankPool, programs: list[Program]) -> str:
    """The failures that the ranks report for programs of one world size; empty if there are
    none."""
    try:
        pool.run(programs[0].world, run_programs, programs, timeout_s=BATCH_TIMEOUT_S)
    except RanksFailed as error:
        return str(error)
    return ""


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that still fails, with fewer steps, parts and neutral operations."""
    return random_programs.shrink(program, _smaller, fails)


def _smaller(program: Program) -> Iterator[Program]:
    for i, step in enumerate(program.steps):
        before, after = program.steps[:i], program.steps[i + 1 :]
        if before or after:
            yield replace(program, steps=before + after)
        for name in step.neutral:
            kept = {key: value for key, value in step.neutral.items() if key != name}
            yield replace(program, steps=[*before, replace(step, neutral=kept), *after])
        if len(step.parts) > 1 and step.neutral.get("raises", 0) == 0:
            yield replace(program, steps=[*before, replace(step, parts=step.parts[-1:]), *after])
        usual: dict[str, Any] = {
            "write": "", "rescale": False, "no_sync": False, "zeros": False, "times": 1,
        }  # fmt: skip
        for name, value in usual.items():
            if getattr(step, name) != value:
                plain = replace(step, **{name: value})
                yield replace(program, steps=[*before, plain, *after])


def main() -> int:
    arguments = random_programs.arguments_of(__doc__).parse_args()
    with RankPool(2) as pool:
        generator = random_programs.Generator(
            draw=draw_program,
            run=lambda programs: run(pool, programs),
            smaller=_smaller,
            batch=BATCH,
        )
        return random_programs.search(generator, arguments)


if __name__ == "__main__":
    sys.exit(main())
