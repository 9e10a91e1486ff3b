# SPDX-License-Identifier: BSD-3-Clause
"""Random programs of training with amp against float64 and against themselves. For thousands:
``python python/tests/amp_programs.py --seeds 0:3000``."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from amp_program_run import LEVELS, OPTIMIZERS, Program, Step, run_program, run_programs
from amp_program_run import PLAIN as PLAIN_LEVELS
from amp_programs import draw_program, run, shrink
from amp_support import fresh_amp  # noqa: F401
from ddp_support import RankPool, RanksFailed, forget_amp

from apex.amp.optimizer import OptimizerStash
from apex.amp.scaler import LossScaler
from apex.fp16_utils import FP16_Optimizer
from apex.optimizers import FusedSGD, _foreach

FIRST_SEED = 3000
CASES = 40


def _drawn(world: int, count: int) -> list[Program]:
    programs = map(draw_program, range(FIRST_SEED, FIRST_SEED + 10 * count))
    return [program for program in programs if program.world == world][:count]


@pytest.mark.parametrize("program", _drawn(1, CASES), ids=lambda program: str(program.seed))
def test_program_of_one_process(program: Program) -> None:
    run_program(program, 0)


@pytest.mark.processes
def test_programs_of_two_ranks(ranks: RankPool) -> None:
    assert not run(ranks, _drawn(2, CASES // 4))


# --- the generator itself ---


def _program(level: str, optimizer: str, *steps: Step, scale: Any = None) -> Program:
    return Program(1, level, optimizer, 1, "", scale, [*steps, steps[-1], steps[-1]])


PLAIN: Any = {"parts": [{"loss": 0, "delay": False, "overflow": False}]}
TWICE: Any = {"parts": PLAIN["parts"] * 2}
OVERFLOW: Any = {"parts": [{"loss": 0, "delay": False, "overflow": True}]}


#: What is broken, and a program that finds it.
FAULTS = {
    "fused kernel": (
        (_foreach, "_wide", lambda tensors, _: tensors),
        _program("O3", "FusedSGD", Step(**PLAIN)),
    ),
    "float16 moments": (
        (_foreach, "wide_type", lambda dtype: dtype),
        _program("float16", "FusedAdam, small", Step(**PLAIN)),
    ),
    "state of a skipped step": (
        (FusedSGD, "found_inf", property(lambda _: False, lambda *_: None, lambda _: None)),
        _program("float32", "FusedSGD, damped", Step(**OVERFLOW), Step(**PLAIN), scale="dynamic"),
    ),
    "overflow of FP16_Optimizer": (
        (FP16_Optimizer, "overflow", property(lambda _: False, lambda *_: None)),
        _program("FP16_Optimizer", "SGD", Step(**OVERFLOW), Step(**PLAIN), scale="dynamic"),
    ),
    "earlier gradients": (
        (OptimizerStash, "prepare", lambda stash, _: stash.collect()),
        _program("O1", "SGD", Step(**TWICE)),
    ),
    "restore": (
        (OptimizerStash, "follow_model", lambda _: None),
        _program("O2", "SGD", Step(**PLAIN, neutral={"restore": "optimizer first"})),
    ),
    "written masters": (
        (OptimizerStash, "masters_to_model", lambda _: None),
        _program("O2", "Adam", Step(**PLAIN, write="before")),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_shrunk(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, program = FAULTS[fault]
    run_program(program, 0)
    monkeypatch.setattr(*replaced, raising=False)

    def fails(candidate: Program) -> bool:
        try:
            run_programs(0, 1, [candidate])
        except AssertionError:
            return True
        return False

    assert fails(program)
    small = shrink(program, fails)
    assert fails(small) and len(small.steps) <= 2
    monkeypatch.undo()
    forget_amp()


def _decides_alone(rank: int, world: int, programs: list[Program]) -> None:
    with mock.patch.object(LossScaler, "synchronize", lambda self: None):
        try:
            run_programs(rank, world, programs)
        except AssertionError:
            dist.destroy_process_group()  # the other rank must not wait for this one
            raise


@pytest.mark.processes
def test_rank_that_decides_alone_to_skip_is_found(ranks: RankPool) -> None:
    """Rank 1 alone has an overflow, in a part that is not synchronized."""
    parts = [*OVERFLOW["parts"], *PLAIN["parts"]]
    steps = [Step(parts, no_sync=True), Step(**PLAIN)]
    alone = Program(1, "O2", "SGD", 1, "apex", None, steps)
    assert not run(ranks, [alone])
    skipping = [p for p in _drawn(2, CASES) if any(p.skips(step) for step in p.steps)]
    for programs in ([alone], skipping):
        with pytest.raises(RanksFailed, match="amp program of seed"):
            ranks.run(2, _decides_alone, programs)


@functools.cache
def _many() -> list[Program]:
    return list(map(draw_program, range(2000)))


def test_drawing_is_by_seed_and_covers_every_optimizer_and_level() -> None:
    assert draw_program(5) == draw_program(5) != draw_program(6)
    programs = _many()
    assert len({(p.level, p.optimizer) for p in programs}) == len(LEVELS) * len(OPTIMIZERS)
    assert {p.wrapper for p in programs} == {"", "apex", "apex, views", "torch"}


def test_drawing_covers_skipped_first_steps() -> None:
    programs = _many()
    skipped = {(p.level in PLAIN_LEVELS, p.optimizer) for p in programs if p.skips(p.steps[0])}
    assert len(skipped) == 2 * len(OPTIMIZERS)
    assert sum(p.skips(p.steps[0]) and p.skips(p.steps[1]) for p in programs) > 50
