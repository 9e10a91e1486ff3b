# SPDX-License-Identifier: BSD-3-Clause
"""Compares the step time, optimizer included, of OverlappedOptimizer and of loops that wait in
backward.

    python benchmarks/overlapped_optimizer.py                         # two ranks on this machine
    benchmarks/netns.sh --script overlapped_optimizer --links "1gbit/0"   # over a slow link

A step is zero_grad(), forward, backward and SGD with momentum. OverlappedOptimizer hides
communication under the next step's forward. So variants take turns of several steps, with a barrier
before and after each turn. No forward follows the last step of a turn, so the time includes its
wait in synchronize(). The time of a step is that of its turn divided by the number of steps, on the
slowest rank. Ratios are medians over rounds of a time divided by that of torch's default in the
same round.

Two lower bounds are computed from times of the same round. If backward() waits: forward + update +
max(backward, all-reduce). With any overlap: max(forward + backward + update, all-reduce). At the
end, parameters are compared with those of the loop that waits.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any

import ddp
import harness
import models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex.parallel import DistributedDataParallel as ApexDDP
from apex.parallel import OverlappedOptimizer

BASE = "torch"
TITLES = {
    "none": "no DDP",
    "forward": "forward alone",
    "comm": "one all-reduce in place, alone",
    "torch": "torch",
    "apex": "apex",
    "overlapped": "apex, OverlappedOptimizer",
    "bound_step": "bound: backward waits",
    "bound_any": "bound: any order",
}
VARIANTS = [
    "none",
    "forward",
    "comm",
    *("torch", "torch@1", "torch@4"),
    *("apex", "apex@1", "apex@4"),
    *("overlapped@1", "overlapped@2", "overlapped@4"),
]
#: "wait" is the time at the end of a turn until nothing is in flight.
PHASES = ("forward", "backward", "update", "wait")
#: Small enough for all of these models, for hundreds of steps on one batch.
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
#: apex orders its buckets after the third backward with a plan. Later backwards do not wait.
UNTIMED_STEPS = 8


def title(variant: str) -> str:
    base, _, size = variant.partition("@")
    return TITLES[base] + (f", {size} MiB" if size else "")


class Loop:
    """A training loop. ``turn()`` is timed."""

    def __init__(self, name: str, model: nn.Module, batch: Tensor, device: str) -> None:
        self.name = name
        self.batch = batch
        self.steps = 1
        self.device = device
        self.restart()
        self.library, _, size = name.partition("@")
        if self.library == "comm":
            first = next(model.parameters())
            count = sum(p.numel() for p in model.parameters())
            self.flat = torch.zeros(count, dtype=first.dtype, device=first.device)
            return
        self.module: nn.Module = copy.deepcopy(model)
        options = {"bucket_cap_mb": float(size)} if size else {}
        if self.library == "torch":
            ids = [torch.cuda.current_device()] if device == "cuda" else None
            self.module = TorchDDP(self.module, device_ids=ids, **options)
        elif self.library in ("apex", "overlapped"):
            self.module = ApexDDP(self.module, **options)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        if self.library == "overlapped":
            self.optimizer = OverlappedOptimizer(self.optimizer, self.module)

    def restart(self) -> None:
        self.turns = 0
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.processor_seconds = 0.0  # CPU time of all threads

    def turn(self) -> None:
        begin = time.process_time()
        for _ in range(self.steps):
            self._step()
        if self.library == "overlapped":
            with self._phase("wait"):
                self.optimizer.synchronize()
        self.processor_seconds += time.process_time() - begin
        self.turns += 1

    def _step(self) -> None:
        if self.library == "comm":
            dist.all_reduce(self.flat)
            return
        with self._phase("forward"):
            self.optimizer.zero_grad()
            loss = self.module(self.batch).float().square().mean()
        if self.library == "forward":
            return
        with self._phase("backward"):
            loss.backward()
        with self._phase("update"):
            self.optimizer.step()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.library == "none" and self.device == "cuda":
            torch.cuda.synchronize()
        self.phases[name] += time.perf_counter() - begin

    def phases_of_a_step(self) -> dict[str, float]:
        steps = self.turns * self.steps
        return {phase: seconds / steps for phase, seconds in self.phases.items() if seconds}

    def counters(self) -> dict[str, int] | None:
        wrapped = self.library in ("apex", "overlapped")
        return self.module.statistics() if wrapped else None


def _compare(loops: dict[str, Loop]) -> list[str]:
    """Raise if parameters differ. With two ranks they must be bitwise equal: a sum of two has one
    order."""
    compared = []
    for name, loop in loops.items():
        if loop.library != "overlapped":
            continue
        size = name.partition("@")[2]
        other = next((n for n in (f"apex@{size}", "apex", BASE) if n in loops), None)
        if other is None:
            continue
        theirs = loops[other].module.module.named_parameters()
        for (key, expected), value in zip(theirs, loop.module.parameters(), strict=True):
            tolerance = {"rtol": 0.0, "atol": 0.0} if dist.get_world_size() <= 2 else {}
            torch.testing.assert_close(
                value,
                expected,
                msg=lambda text, n=name, o=other, k=key: f"{n}, {o}: {k}: {text}",
                **tolerance,
            )
            if not torch.isfinite(value).all():
                raise RuntimeError(f"{name}: {key} is not finite, so these steps prove nothing")
        compared.append(f"{title(name)} = {title(other)}")
    return compared


def _bounds(columns: dict[str, list[float]], phases: dict[str, float]) -> dict[str, list[float]]:
    """The bounds from the times of each round. The share of backward in a step is from all
    rounds."""
    part = phases["backward"] / sum(phases.values())
    rows = list(zip(columns["none"], columns["comm"], strict=True))
    return {
        "bound_step": [(1 - part) * c + max(part * c, comm) for c, comm in rows],
        "bound_any": [max(compute, comm) for compute, comm in rows],
    }


def measure(
    model_name: str, names: list[str], device: str, steps: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """Time ``rounds`` turns of ``steps`` steps, or fewer if ``seconds`` run out. Collective."""
    model, batch = models.make(model_name, device)
    loops = {name: Loop(name, model, batch, device) for name in names}
    turns = harness.Turns(device)
    for _ in range(UNTIMED_STEPS):
        for loop in loops.values():
            turns.timed(loop.turn)
    before = {name: loop.counters() for name, loop in loops.items()}
    for loop in loops.values():
        loop.steps = steps
        loop.restart()
    taken = turns.take([loop.turn for loop in loops.values()], rounds, seconds)
    columns = {name: [t / steps for t in times] for name, times in zip(names, taken, strict=True)}
    if {"none", "comm"} <= set(columns):
        columns |= _bounds(columns, loops["none"].phases)
    result: dict[str, Any] = {
        "model": model_name,
        "title": models.MODELS[model_name][0],
        "megabytes": round(models.megabytes(model), 1),
        "parameters": sum(1 for _ in model.parameters()),
        "rounds": len(taken[0]),
        "steps": steps,
        "same_parameters": _compare(loops),
        "variants": {},
    }
    for name, column in columns.items():
        entry: dict[str, Any] = {"seconds": harness.quartiles(column), "raw_seconds": column}
        if BASE in columns:
            entry["ratio"] = harness.ratios(column, columns[BASE])
        if name in loops:
            entry["phases_seconds"] = loops[name].phases_of_a_step()
        if name in loops and before[name] is not None:
            entry["per_step"] = ddp.per_step(before[name], loops[name].counters())
            entry["plan_bytes"] = ddp.plan_bytes(loops[name].module)
        result["variants"][name] = entry
    if "comm" in columns:
        seconds_alone = result["variants"]["comm"]["seconds"]["median"]
        result["comm_gbit_per_s"] = ddp.sent_gbit(model) / seconds_alone
        result["comm_cores"] = loops["comm"].processor_seconds / sum(columns["comm"]) / steps
    return result


def report(result: dict[str, Any]) -> str:
    head = ["variant", "step, ms (quartiles)", "ratio to torch (quartiles)"]
    head += [f"{phase}, ms" for phase in PHASES]
    rows = []
    for name, entry in result["variants"].items():
        spent = entry.get("phases_seconds", {})
        rows.append(
            [
                title(name),
                harness.show(entry["seconds"], 1e3, digits=1),
                harness.show(entry["ratio"], digits=3) if "ratio" in entry else "",
                *(f"{1e3 * spent[phase]:.1f}" if phase in spent else "" for phase in PHASES),
            ]
        )
    text = (
        f"\n### {result['title']} ({result['parameters']} parameters, {result['megabytes']:g} MB), "
        f"{result['rounds']} rounds of {result['steps']} steps\n\n{harness.table(head, rows)}"
    )
    notes = []
    if "comm_gbit_per_s" in result:
        notes.append(
            f"The all-reduce alone sends {result['comm_gbit_per_s']:.3f} Gbit/s out of each rank "
            f"and keeps {result['comm_cores']:.2f} cores a rank busy, without what the kernel does "
            "in interrupts. Phases are means on rank 0."
        )
    for name, entry in result["variants"].items():
        if entry.get("per_step", {}).get("deferred"):
            notes.append(
                f"Buckets with {title(name)}, in MiB, as sent: {ddp.sizes(entry['plan_bytes'])}; "
                f"{100 * entry['per_step']['deferred']:.0f} % of the backwards did not wait."
            )
    if result["same_parameters"]:
        notes.append(
            f"Parameters after the run, bit for bit: {'; '.join(result['same_parameters'])}."
        )
    return "\n\n".join([text, *notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=list(models.MODELS), default=["resnet18"])
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", default=VARIANTS,
                        help=f"default: {' '.join(VARIANTS)}; KIND@MIB: buckets")  # fmt: skip
    parser.add_argument(
        "--steps", type=harness.positive_int, default=5, help="between two barriers"
    )
    parser.add_argument("--rounds", type=harness.positive_int, default=12)
    parser.add_argument(
        "--seconds", type=harness.positive_float, default=240.0, help="at most, per model"
    )
    harness.add_arguments(parser, "overlapped_optimizer")
    arguments = parser.parse_args()
    unknown = [
        n for n in arguments.variants if n not in TITLES and n.partition("@")[0] not in TITLES
    ]
    if unknown or BASE not in arguments.variants:
        parser.error(f"--variants: {BASE} has to be among them, and {unknown} is unknown")

    options = (arguments.variants, arguments.device, arguments.steps, arguments.rounds,
               arguments.seconds)  # fmt: skip
    harness.run_models(arguments, TITLES, measure, options, report)


if __name__ == "__main__":
    main()
