# SPDX-License-Identifier: BSD-3-Clause
"""Draws, runs and shrinks random programs over several models, wrappers and optimizers.

``python python/tests/ddp_programs.py --seeds 0:5000`` runs a range, prints the seed of each failure
and the smallest program that still fails. What ranks do and check is in ddp_program_run.py. With
APEX_TEST_DEVICE=cuda the models are on the first GPU and ranks talk over NCCL.
"""

from __future__ import annotations

import copy
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import random_programs
from ddp_program_nets import ALIASING
from ddp_program_run import HOOKS, Op, Program, run_programs
from ddp_support import DEVICE, RankPool, RanksFailed

BATCH_TIMEOUT_S = 300  # each program has its own limit

HAZARDS = (
    "accumulate", "alias", "backwards", "chain", "change", "checkpoint", "collective", "copy",
    "drop", "evaluate", "fail", "forwards", "freeze", "group", "held", "hook", "large", "old",
    "optimizers", "options", "python", "raise", "rewrap", "several", "share", "skip", "sparse",
    "syncbn", "tiny",
)  # fmt: skip

#: Operations that need the host to read other ranks' reports in every backward, or that are
#: CPU-only.
ON_THE_HOST = ("drop", "raise")

OPTIONS: tuple[dict[str, Any], ...] = (
    {"message_size": 1},
    {"message_size": 20},
    {"bucket_cap_mb": 1e-4},
    {"delay_allreduce": True},
    {"gradient_as_bucket_view": True},
    {"allreduce_always_fp32": True},
    {"gradient_predivide_factor": 2.0},
    {"static_graph": True},
    {"check_finite": True},
    {"num_allreduce_streams": 2},
    {"check_reduction": True},
)

CHANGES = (
    "double", "float", "half_float", "channels_last", "data", "transposed", "grad_data", "grad_new",
    "load", "assign", "replace", "rebuild_buckets",
)  # fmt: skip


class Draw:
    """Draws a program. Hazards that are not in ``hazards`` do not occur."""

    def __init__(self, seed: int, world: int | None, hazards: set[str]) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.hazards = hazards
        self.world = world or world_of(seed)

    def chance(self, hazard: str, probability: float) -> bool:
        drawn = self.rng.random() < probability  # always drawn, so that seeds stay comparable
        return drawn and hazard in self.hazards

    def program(self) -> Program:
        rng = self.rng
        count = rng.choice([1, 1, 2, 2, 3]) if "several" in self.hazards else 1
        models = [self._kinds() for _ in range(count)]
        shared = count > 1 and self.chance("share", 0.4)
        if shared and models[1][0] != models[0][0]:
            models[1][0] = models[0][0]
        self.models = models
        self.python = self.chance("python", 0.25)  # one group, whose messages all wrappers share
        ops = [self._wrap(m) for m in range(count)]
        ops += [self._step()]
        for _ in range(rng.randint(3, 8)):
            ops.append(self._op())
        ops.append(self._step())
        return Program(self.seed, self.world, models, shared, ops)

    def _kinds(self) -> list[str]:
        kinds = ["linear"] * 4 + ["conv", "embedding", "scale"]
        kinds += list(ALIASING) * ("alias" in self.hazards)
        kinds += ["large"] * 2 * ("large" in self.hazards)
        kinds += ["sparse"] * ("sparse" in self.hazards)
        drawn = [self.rng.choice(kinds) for _ in range(self.rng.randint(1, 4))]
        if self.chance("syncbn", 0.2):
            drawn.insert(self.rng.randint(0, len(drawn)), "syncbn")
        return drawn

    def _make(self, kind: str, **args: Any) -> Op:
        args = {key: value for key, value in args.items() if value not in (None, False, 0, [], {})}
        return Op(kind, self.rng.randrange(1 << 30), args)

    def _model(self) -> int:
        return self.rng.randrange(len(self.models))

    def _some_ranks(self) -> list[int]:
        count = self.rng.randint(1, self.world)
        return sorted(self.rng.sample(range(self.world), count))

    def _wrap(self, m: int, keep: bool = False) -> Op:
        options: dict[str, Any] = {}
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            option = self.rng.choice(OPTIONS)
            if "options" in self.hazards:
                options.update(option)
        if "delay_allreduce" in options:
            options.pop("num_allreduce_streams", None)
        if "bucket_cap_mb" in options:
            options.pop("message_size", None)
        hook = self.rng.choice(list(HOOKS)) if self.chance("hook", 0.2) else None
        group = self.rng.choice(["new", "shared"]) if self.chance("group", 0.3) else None
        if self.python:
            group, hook = "python", None
            options.pop("num_allreduce_streams", None)
        return self._make("wrap", model=m, options=options, hook=hook, group=group, keep=keep)

    def _skips(self) -> list[list[int]]:
        def row() -> list[int]:
            return [b for b in range(5) if self.rng.random() < 0.35]

        return [row() for _ in range(self.world)] if self.chance("skip", 0.3) else []

    def _step(self) -> Op:
        rng = self.rng
        forwards = []
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
            each = {"model": self._model(), "skip": self._skips(), "old": self.chance("old", 0.3)}
            forwards.append({key: value for key, value in each.items() if value})
        if "several" not in self.hazards:
            forwards = forwards[:1]
        raises = None
        if self.chance("raise", 0.15):
            raises = {
                "ranks": self._some_ranks(), "forward": rng.randrange(3), "block": rng.randrange(4)
            }  # fmt: skip
        drops = not raises and len(forwards) == 1 and not forwards[0].get("old")
        how = rng.choice(["each", "reversed", "twice"]) if self.chance("backwards", 0.4) else None
        kind = rng.choice(["reentrant", "non-reentrant"])
        return self._make(
            "step",
            forwards=forwards,
            clear=rng.choice([None, None, "zeros", "skip"]),
            how=how,
            chain=len(forwards) > 1 and self.chance("chain", 0.3),
            collective=self.chance("collective", 0.2),
            accumulate=rng.choice([1, 2]) if self.chance("accumulate", 0.2) else 0,
            checkpoint=kind if self.chance("checkpoint", 0.2) else None,
            raises=raises,
            hold=self._some_ranks() if self.chance("held", 0.2) else None,
            more=self._some_ranks() if self.chance("forwards", 0.2) else None,
            drop=self._some_ranks() if drops and self.chance("drop", 0.3) else None,
            no_optimizer=rng.random() < 0.2,
            tiny=self.chance("tiny", 0.08),  # subnormal gradients
        )

    def _op(self) -> Op:
        rng, m = self.rng, self._model()
        kinds = ["step"] * 10
        for kind, hazard, weight in (
            ("rewrap", "rewrap", 2), ("freeze", "freeze", 3), ("change", "change", 4),
            ("copy", "copy", 1), ("evaluate", "evaluate", 2), ("release", "held", 1),
            ("fail_forward", "fail", 1), ("optimizer", "optimizers", 1),
        ):  # fmt: skip
            kinds += [kind] * weight * (hazard in self.hazards)
        kind = rng.choice(kinds)
        if kind == "step":
            return self._step()
        if kind == "rewrap":
            return self._wrap(m, keep=rng.random() < 0.4)
        if kind == "freeze":
            some = [p for p in range(8) if rng.random() < 0.3]
            which = rng.choice([some, some, [], list(range(12))])
            return self._make("freeze", model=m, parameters=which)
        if kind in ("change", "copy"):
            what = rng.choice(CHANGES) if kind == "change" else "copy"
            return self._make("change", model=m, what=what, block=rng.randrange(4))
        if kind == "evaluate":
            return self._make(kind, model=m, ranks=self._some_ranks(), grad=rng.random() < 0.5)
        if kind == "optimizer":
            return self._make(kind, model=m, optimizer=rng.choice(["sgd", "adamw", "fused"]))
        return self._make(kind, model=m, block=rng.randrange(4))


def world_of(seed: int) -> int:
    return 2 + (seed % 5 >= 3)


def draw_program(seed: int, world: int | None = None, only: str | None = None) -> Program:
    hazards = set(only.split(",")) if only else set(HAZARDS)
    if DEVICE != "cpu":
        hazards -= set(ON_THE_HOST)
    unknown = hazards - set(HAZARDS)
    if unknown:
        raise ValueError(f"no such hazard: {sorted(unknown)}; there are {', '.join(HAZARDS)}")
    return Draw(seed, world, hazards).program()


# --- shrinking ---


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one element less, the largest element first."""

    def changed(**fields: Any) -> Program:
        return Program(**{**vars(program), **fields})

    ops, models = program.ops, program.models
    size = len(ops) // 2
    while size:
        for i in range(0, len(ops), size):
            yield changed(ops=ops[:i] + ops[i + size :])
        size //= 2
    if len(models) > 1:
        yield changed(models=models[:-1])
    if program.shared:
        yield changed(shared=False)
    for m, kinds in enumerate(models):
        for i in range(len(kinds) if len(kinds) > 1 else 0):
            rest = [*models[:m], kinds[:i] + kinds[i + 1 :], *models[m + 1 :]]
            yield changed(models=rest)
    for i, op in enumerate(ops):
        for args in _smaller_value(op.args):
            yield changed(ops=[*ops[:i], Op(op.kind, op.uid, args), *ops[i + 1 :]])
    if program.world > 2:
        yield changed(world=program.world - 1)


def _smaller_value(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
        for key, item in value.items():
            if key != "raises":  # its entries must stay together
                for less in _smaller_value(item):
                    yield {**value, key: less}
    elif isinstance(value, list):
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
        for i, item in enumerate(value):
            for less in _smaller_value(item):
                yield [*value[:i], less, *value[i + 1 :]]


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest failing program that was found."""
    return random_programs.shrink(copy.deepcopy(program), smaller, fails)


# --- running many ---


def run(pool: RankPool, programs: list[Program]) -> str:
    """The failure of the first failing program; empty if none fails."""
    world = programs[0].world
    with tempfile.TemporaryDirectory() as folder:
        try:
            pool.run(world, run_programs, programs, folder, timeout_s=BATCH_TIMEOUT_S)
        except RanksFailed as failed:
            message = brief(str(failed))
            if "program of seed" in message:
                return message
            notes = (read_text(os.path.join(folder, str(rank))) for rank in range(world))
            return "".join(notes) or message  # no program was started
    return ""


def read_text(path: str) -> str:
    """The stack of a stuck rank, innermost calls only."""
    if not os.path.exists(path):
        return ""
    with open(path) as notes:
        return "".join(notes.readlines()[:9])


def brief(message: str) -> str:
    """The report of each rank, without the traceback of its transport."""
    ranks = re.split(r"^--- ", message, flags=re.MULTILINE)[1:]
    return "\n".join(
        f"{rank.splitlines()[0]} {rank.partition('AssertionError: ')[2] or rank}".strip()
        for rank in ranks
        if "another rank failed" not in rank
    )


def show(program: Program) -> str:
    head = f"  world={program.world} models={program.models} shared={program.shared}"
    return "\n".join([head, *(f"  {op}" for op in program.ops)])


def main() -> int:
    parser = random_programs.arguments_of(__doc__, worlds=(2, 3, 4))
    parser.add_argument("--only", help=f"hazards, by comma, of {', '.join(HAZARDS)}")
    arguments = parser.parse_args()
    with RankPool(4) as pool:
        generator = random_programs.Generator(
            draw=lambda seed: draw_program(seed, arguments.world, arguments.only),
            run=lambda programs: run(pool, programs),
            smaller=smaller,
            show=show,
        )
        return random_programs.search(generator, arguments)


if __name__ == "__main__":
    sys.exit(main())
