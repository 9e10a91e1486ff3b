# SPDX-License-Identifier: BSD-3-Clause
"""Random batch-norm programs against one process in float64. For thousands:
``python python/tests/batch_norm_programs.py --seeds 0:3000``."""

from __future__ import annotations

import copy

import pytest
from batch_norm_programs import draw_program, run, shrink
from ddp_support import RankPool
from sync_batch_norm_support import first_seed

pytestmark = pytest.mark.processes

CASES = 60


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_batch_norm_programs_equal_one_process(ranks: RankPool, world: int) -> None:
    first = first_seed()
    assert not run(ranks, [draw_program(seed, world) for seed in range(first, first + CASES)])


def test_batch_norm_programs_a_wrong_output_is_found_and_shrunk(ranks: RankPool) -> None:
    program = draw_program(1, 2)
    program.steps.append(copy.deepcopy(program.steps[0]))
    program.steps[-1].sabotage = True
    program.steps[-1].sizes = [2, 3]
    message = run(ranks, [draw_program(0, 2), program])
    assert f"batch-norm program of seed 1, step {len(program.steps) - 1}" in message
    small = shrink(program, lambda less: bool(run(ranks, [less])))
    assert [step.sabotage for step in small.steps] == [True]
    assert small.channels == 1 and small.spatial == []


def test_batch_norm_programs_are_drawn_by_seed() -> None:
    assert draw_program(5) == draw_program(5) != draw_program(6)
    assert {draw_program(seed).world for seed in range(30)} == {1, 2, 3}
