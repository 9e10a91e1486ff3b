# SPDX-License-Identifier: BSD-3-Clause
"""Draws, runs and shrinks random programs over several models, wrappers and optimizers.

    cd python/tests
    python ddp_programs.py --seeds 0:5000 [--world 2]    # prints the smallest failing programs
    python ddp_programs.py --seeds 1234                  # one program
    python ddp_programs.py --only join,weights,skip      # no other hazards; HAZARDS names all

The package that is installed is tested; no build is needed. Every rank has its own random seed, a
step is compared with one process in float64, and ranks with each other bit for bit. A program that
is stuck for APEX_TEST_CASE_S (30) seconds prints the stacks of its ranks. On a busy machine that is
no fault: run the seed again. ddp_program_run.py has the operations, ddp_program_steps.py the
training steps, and ddp_program_reference.py what must come out. With APEX_TEST_DEVICE=cuda the
models are on the first GPU and ranks talk over NCCL.
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
from ddp_program_changes import CHANGES
from ddp_program_nets import ALIASING, LAYOUTS, WITH_DTYPES
from ddp_program_run import HOOKS, Op, Program, run_programs
from ddp_support import DEVICE, RankPool, RanksFailed

BATCH_TIMEOUT_S = 300  # each program has its own limit

#: What may occur in a program. For each of them, test_ddp_programs.py plants a fault.
HAZARDS = (
    "accumulate", "adapter", "again", "ahead", "alias", "backwards", "buffers", "chain", "change",
    "checkpoint", "clear", "collective", "complex", "copy", "drop", "dtypes", "evaluate", "fail",
    "fails_locally", "forwards", "freeze", "freeze_alone", "give_up", "group", "held", "hook",
    "infinite", "inputs", "join", "large", "layouts", "old", "optimizers", "options", "python",
    "quiet", "raise", "rewrap", "several", "share", "skip", "skip_failures", "sockets", "sparse",
    "sum", "syncbn", "tiny", "weights",
)  # fmt: skip

#: Operations that need the host to read other ranks' reports in every backward, or that are
#: CPU-only.
ON_THE_HOST = ("drop", "freeze_alone", "infinite", "join", "raise", "skip_failures", "sockets")

OPTIONS: tuple[dict[str, Any], ...] = (
    {"message_size": 1},
    {"message_size": 20},
    {"bucket_cap_mb": 1e-4},
    {"delay_allreduce": True},
    {"gradient_as_bucket_view": True},
    {"retain_allreduce_buffers": True},
    {"triggers": True},
    {"allreduce_always_fp32": True},
    {"gradient_predivide_factor": 3.0},
    {"static_graph": True},
    {"check_finite": True},
    {"num_allreduce_streams": 2},
    {"check_reduction": True},
)


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
        self.narrow = self.chance("dtypes", 0.2)
        models = [self._kinds() for _ in range(count)]
        shared = count > 1 and self.chance("share", 0.4)
        if shared and models[1][0] != models[0][0]:
            models[1][0] = models[0][0]
        self.models = models
        self.python = self.chance("python", 0.2)  # one group, whose messages all wrappers share
        self.average = "sum" if self.chance("sum", 0.1) else "mean"
        self.average = "weighted" if self.chance("weights", 0.25) else self.average
        on_failure = "skip" if self.chance("skip_failures", 0.25) else "raise"
        ops = [self._wrap(m) for m in range(count)]
        ops += [self._step()]
        for _ in range(rng.randint(3, 8)):
            ops.append(self._op())
        ops.append(self._step())
        return Program(self.seed, self.world, models, shared, ops, self.average, on_failure)

    def _kinds(self) -> list[str]:
        kinds = ["linear"] * 5 + ["conv", "embedding", "scale"]
        for hazard, some in (
            ("alias", ALIASING), ("large", ["large"] * 2), ("sparse", ["sparse"]),
            ("layouts", LAYOUTS), ("complex", ["complex"]), ("adapter", ["adapter"]),
            ("buffers", ["buffer"]), ("again", ["again"] * 2),
        ):  # fmt: skip
            kinds += list(some) * (hazard in self.hazards)
        drawn = [self.rng.choice(kinds) for _ in range(self.rng.randint(1, 4))]
        if self.narrow:
            dtypes = ["", ":float64", ":float16", ":bfloat16"]
            suffix = self.rng.choice([dtypes, dtypes[2:3], dtypes[3:]])
            drawn = [k + self.rng.choice(suffix) if k in WITH_DTYPES else k for k in drawn]
            # torch cannot add sparse tensors of these dtypes.
            return ["embedding" if k == "sparse" else k for k in drawn]
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
        if self.chance("infinite", 0.5):
            options["check_finite"] = True
        if "delay_allreduce" in options:
            options.pop("num_allreduce_streams", None)
            options.pop("triggers", None)
        if "bucket_cap_mb" in options:
            options.pop("message_size", None)
        hook = self.rng.choice(list(HOOKS)) if self.chance("hook", 0.2) else None
        group = self.rng.choice(["new", "shared"]) if self.chance("group", 0.3) else None
        if self.python:
            group, hook = "python", None
            options.pop("num_allreduce_streams", None)
        sockets = self.chance("sockets", 0.2)
        return self._make(
            "wrap", model=m, options=options, hook=hook, group=group, keep=keep, sockets=sockets
        )

    def _skips(self) -> list[list[int]]:
        def row() -> list[int]:
            return [b for b in range(5) if self.rng.random() < 0.35]

        alike = self.rng.random() < 0.25  # no rank uses these blocks
        rows = [row() for _ in range(1 if alike else self.world)]
        return rows if self.chance("skip", 0.3) else []

    def _weights(self) -> list[list[float]]:
        """Of each micro-batch, by rank."""
        if self.average != "weighted":
            return []
        values = self.rng.choice([[0, 1, 2, 5], [0, 3], [0.5, 2.25]])
        return [[float(self.rng.choice(values)) for _ in range(self.world)] for _ in range(3)]

    def _boom(self) -> dict[str, Any]:
        rng = self.rng
        return {"ranks": self._some_ranks(), "forward": rng.randrange(3), "block": rng.randrange(4)}

    def _step(self) -> Op:
        rng = self.rng
        forwards = []
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
            each = {"model": self._model(), "skip": self._skips(), "old": self.chance("old", 0.3)}
            forwards.append({key: value for key, value in each.items() if value})
        if "several" not in self.hazards:
            forwards = forwards[:1]
        hows = ["each", "reversed", "twice", "first", "penalty"]
        how = rng.choice(hows) if self.chance("backwards", 0.4) else None
        kind = rng.choice(["reentrant", "non-reentrant"]) + rng.choice(["", "", ":1", ":2", ":4"])
        quiet_how = rng.choice(["no_sync", "nested", "backward", "disable", "attribute"])
        often = ("ahead", "fails_locally", "give_up")  # these need an accumulation
        micros = 0.5 if len(self.hazards) < 5 and self.hazards.intersection(often) else 0.2
        accumulates = rng.random() < micros
        accumulates &= bool(self.hazards.intersection(("accumulate", *often)))
        quiet = [self._model()] if self.chance("quiet", 0.1) else None
        fails = self.chance("fails_locally", 0.2)
        return self._make(
            "step",
            forwards=forwards,
            clear=rng.choice([None, None, "zeros", "skip"]) if "clear" in self.hazards else None,
            how=how,
            chain=len(forwards) > 1 and self.chance("chain", 0.3),
            collective=self.chance("collective", 0.2),
            accumulate=rng.choice([1, 2]) if accumulates else 0,
            quiet_how=quiet_how if accumulates or quiet else None,
            quiet=quiet,
            ahead=self.chance("ahead", 0.3) and accumulates,
            give_up=self._some_ranks() if self.chance("give_up", 0.2) and accumulates else None,
            fails_locally=self._boom() if fails and accumulates else None,
            weights=self._weights(),
            weighs=rng.choice([None, "backward", "tensor"]) if self.average == "weighted" else None,
            checkpoint=kind if self.chance("checkpoint", 0.2) else None,
            inputs=[rng.randrange(8)] if self.chance("inputs", 0.1) else None,
            raises=self._boom() if self.chance("raise", 0.15) else None,
            hold=self._some_ranks() if self.chance("held", 0.2) else None,
            more=self._some_ranks() if self.chance("forwards", 0.2) else None,
            drop=self._some_ranks() if self.chance("drop", 0.2) else None,
            freeze_alone=self._some_ranks() if self.chance("freeze_alone", 0.1) else None,
            infinite=self._some_ranks() if self.chance("infinite", 0.2) else None,
            no_optimizer=rng.random() < 0.2,
            tiny=self.chance("tiny", 0.08),  # subnormal gradients
        )

    def _op(self) -> Op:
        rng, m = self.rng, self._model()
        kinds = ["step"] * 10
        for kind, hazard, weight in (
            ("rewrap", "rewrap", 2), ("freeze", "freeze", 3), ("change", "change", 4),
            ("copy", "copy", 1), ("evaluate", "evaluate", 2), ("release", "held", 1),
            ("fail_forward", "fail", 1), ("optimizer", "optimizers", 1), ("join", "join", 1),
            ("buffers", "buffers", 1),
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
        if kind in ("change", "copy", "buffers"):
            what = rng.choice(CHANGES) if kind == "change" else kind
            return self._make("change", model=m, what=what, block=rng.randrange(4))
        if kind == "evaluate":
            return self._make(kind, model=m, ranks=self._some_ranks(), grad=rng.random() < 0.5)
        if kind == "optimizer":
            return self._make(kind, model=m, optimizer=rng.choice(["sgd", "adamw", "fused"]))
        if kind == "join":
            counts = [rng.randint(0, 3) for _ in range(self.world)]
            return self._make(kind, model=m, counts=counts, weights=self._weights())
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

PLAIN = {"shared": False, "average": "mean", "on_failure": "raise"}


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
    for name in PLAIN:
        if getattr(program, name) != (plain := PLAIN[name]):
            yield changed(**{name: plain})
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
            if key not in ("raises", "fails_locally"):  # their entries must stay together
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


def run(pool: RankPool, programs: list[Program], *limit_s: float) -> str:
    """The failure of the first failing program; empty if none fails."""
    world = programs[0].world
    with tempfile.TemporaryDirectory() as folder:
        try:
            pool.run(world, run_programs, programs, folder, *limit_s, timeout_s=BATCH_TIMEOUT_S)
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
    fields = {name: value for name, value in vars(program).items() if name != "ops"}
    head = f"  {', '.join(f'{name}={value}' for name, value in fields.items())}"
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
