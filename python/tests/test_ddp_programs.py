# SPDX-License-Identifier: BSD-3-Clause
"""Random programs over several wrappers and optimizers against one process in float64. For
thousands: ``python python/tests/ddp_programs.py --seeds 0:5000``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ddp_programs import HAZARDS, Op, Program, draw_program, run, shrink
from ddp_support import RankPool

pytestmark = pytest.mark.processes

FIRST_SEED = 1000
CASES = {2: 60, 3: 40, 4: 20}  # each takes a third of a second on busy cores
BATCH = 20


@pytest.mark.parametrize(
    ("world", "first"),
    [(w, FIRST_SEED + i) for w, count in CASES.items() for i in range(0, count, BATCH)],
)
def test_programs_equal_one_process(ranks: RankPool, world: int, first: int) -> None:
    programs = [draw_program(seed, world) for seed in range(first, first + BATCH)]
    assert not run(ranks, programs)


# --- the generator itself: a test that finds no fault tests nothing ---


def _words(value: object) -> Iterator[str]:
    """Every name and string in a program."""
    if isinstance(value, (Op, Program)):
        yield from _words(vars(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _words(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _words(item)
    elif isinstance(value, str):
        yield from value.split(":")


#: The words that show that a hazard occurs in a program, if it is not its name.
SHOWN = {
    "alias": ("pos", "two", "expand", "chunk", "cat"),
    "backwards": ("first", "twice", "penalty"),
    "buffers": ("buffer",),
    "dtypes": ("float16", "bfloat16"),
    "fail": ("fail_forward",),
    "freeze": ("parameters",),
    "forwards": ("more",),
    "held": ("hold",),
    "layouts": ("transposed", "gaps", "empty"),
    "optimizers": ("optimizer",),
    "raise": ("raises",),
    "rewrap": ("keep",),
    "skip_failures": ("skip",),
    "weights": ("weighted",),
}
#: Hazards that need another one.
WITH = {
    "ahead": ["accumulate"], "chain": ["several"], "fails_locally": ["accumulate"],
    "give_up": ["accumulate"], "old": ["rewrap"], "share": ["several"], "skip_failures": ["raise"],
}  # fmt: skip


def _drawn(hazard: str) -> Program:
    """The first program in which the hazard occurs, and no other that it does not need."""
    only = ",".join([hazard, *WITH.get(hazard, [])])
    for seed in range(200):
        program = draw_program(seed, 2, only=only)
        if hazard == "share":
            if program.shared:
                return program
        elif hazard == "several":
            if len(program.models) > 1:
                return program
        elif set(SHOWN.get(hazard, (hazard,))) & set(_words(program)):
            return program
    raise AssertionError(f"no program with {hazard}")


@pytest.mark.parametrize("hazard", HAZARDS)
def test_wrong_gradients_are_found_with_every_hazard(ranks: RankPool, hazard: str) -> None:
    """All ranks have the same wrong gradients, so only the reference can tell."""
    program = _drawn(hazard)
    assert not run(ranks, [program])
    program.fault = "gradients"
    assert "gradient of" in run(ranks, [program])


#: What a faulty library does, with what is said then: it ignores the hazard.
IGNORED = {
    "accumulate": "gradient of",
    "backwards": "gradient of",
    "chain": "gradient of",
    "clear": "gradient of",
    "drop": "was not skipped",
    "freeze": "gradient of",
    "freeze_alone": "got None",
    "give_up": "gradient of",
    "infinite": "got None",
    "inputs": "gradient of",
    "raise": "raise, got",
    "skip": "gradient of",
    "tiny": "gradient of",
    "weights": "gradient of",
}


@pytest.mark.parametrize("hazard", IGNORED)
def test_ignored_hazard_is_found(ranks: RankPool, hazard: str) -> None:
    program = _drawn(hazard)
    program.fault = hazard
    if hazard == "freeze":  # right before a step
        program.ops.insert(-1, Op("freeze", 0, {"parameters": [0]}))
    assert IGNORED[hazard] in run(ranks, [program])


def _broken(seed: int, **sabotage: object) -> Program:
    """A drawn program with an additional step in which something goes wrong."""
    program = draw_program(seed, 2)
    program.ops.insert(len(program.models) + 1, Op("step", 7, dict(sabotage)))
    return program


@pytest.mark.parametrize("rank", [0, 1], ids=["checked_rank", "other_rank"])
def test_a_wrong_gradient_of_one_rank_is_found_and_shrunk(ranks: RankPool, rank: int) -> None:
    program = _broken(1000, sabotage=rank)
    assert run(ranks, [program])
    small = shrink(program, lambda less: bool(run(ranks, [less])))
    assert [op.kind for op in small.ops] == ["wrap", "step"], small
    assert small.ops[1].args == {"sabotage": rank}
    assert len(small.models) == 1 and len(small.models[0]) == 1


def test_a_program_that_is_stuck_is_found(ranks: RankPool) -> None:
    assert not run(ranks, [draw_program(1000, 2)])  # the ranks have started
    message = run(ranks, [draw_program(1000, 2), _broken(1001, waits=1)], 4)
    assert "program of seed 1001: stuck" in message


def test_drawing_is_by_seed_and_hazard() -> None:
    assert draw_program(5) == draw_program(5) != draw_program(6)
    for seed in range(50):
        program = draw_program(seed, only="raise")
        assert len(program.models) == 1
        assert {op.kind for op in program.ops} <= {"wrap", "step"}
