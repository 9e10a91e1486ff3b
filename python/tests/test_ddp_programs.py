# SPDX-License-Identifier: BSD-3-Clause
"""Random programs over several wrappers and optimizers against one process in float64. For
thousands: ``python python/tests/ddp_programs.py --seeds 0:5000``."""

from __future__ import annotations

import pytest
from ddp_programs import Op, Program, draw_program, run, shrink
from ddp_support import RankPool

pytestmark = pytest.mark.processes

FIRST_SEED = 1000
CASES = 60  # each takes a third of a second on busy cores
BATCH = 30


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + CASES // 2, BATCH))
def test_programs_equal_one_process(ranks: RankPool, first: int, world: int) -> None:
    programs = [draw_program(seed, world) for seed in range(first, first + BATCH)]
    assert not run(ranks, programs)


# --- the generator itself ---


def _broken(seed: int, **sabotage: object) -> Program:
    """A drawn program with an additional step in which something goes wrong."""
    program = draw_program(seed, 2)
    program.ops.insert(len(program.models) + 1, Op("step", 7, dict(sabotage)))
    return program


@pytest.mark.parametrize("sabotage", [{"sabotage": 0}, {"sabotage": 1}, {"alone": True}],
                         ids=["checked_rank", "other_rank", "not_synchronized"])  # fmt: skip
def test_a_wrong_gradient_is_found_and_shrunk(ranks: RankPool, sabotage: dict[str, object]) -> None:
    program = _broken(1000, **sabotage)
    assert run(ranks, [program])
    small = shrink(program, lambda less: bool(run(ranks, [less])))
    assert [op.kind for op in small.ops] == ["wrap", "step"], small
    assert small.ops[1].args == sabotage
    assert len(small.models) == 1 and len(small.models[0]) == 1


def test_a_program_that_is_stuck_is_found(ranks: RankPool) -> None:
    message = run(ranks, [draw_program(1000, 2), _broken(1001, waits=1)])
    assert "program of seed 1001: stuck" in message


def test_drawing_is_by_seed_and_hazard() -> None:
    assert draw_program(5) == draw_program(5) != draw_program(6)
    for seed in range(50):
        program = draw_program(seed, only="raise")
        assert len(program.models) == 1
        assert {op.kind for op in program.ops} <= {"wrap", "step"}
