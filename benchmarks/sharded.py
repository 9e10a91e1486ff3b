# SPDX-License-Identifier: BSD-3-Clause
"""Compares whole steps with ShardedOptimizer and with optimizers that step everything on every
rank.

    python benchmarks/sharded.py                        # two ranks on this machine
    python benchmarks/sharded.py --optimizers muon --models transformer

A step is zero_grad(), forward, backward and step(). All variants run in one process group and take
turns step by step, with a barrier before and after each step. A time is that of the slowest rank.
Ratios are medians over rounds of a time divided by the baseline of the same round. In the baseline,
the same processes train without data parallelism: each alone, with the same optimizer. "update" is
step() alone, which is measured on CPUs. The size of the optimizer state is that of the rank with
the largest state, in bytes.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import harness
import models
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex.optimizers import ShardedOptimizer
from apex.parallel import DistributedDataParallel as ApexDDP

BASE = "none"
TITLES = {
    "none": "no data parallelism",
    "torch": "torch's DDP",
    "torch_zero": "torch's DDP, ZeroRedundancyOptimizer",
    "apex": "apex's DDP",
    "apex_sharded": "apex's DDP, ShardedOptimizer",
}
#: Optimizer classes and their arguments, by name.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 1e-4, "foreach": True}),
    "muon": (torch.optim.Muon, {"lr": 1e-4}),
}


class Variant:
    """One way to train a model. ``step()`` is timed."""

    def __init__(self, name: str, optimizer: str, model: nn.Module, batch: Tensor) -> None:
        self.name = name
        self.device = batch.device.type
        self.batch = batch
        self.module: nn.Module = copy.deepcopy(model)
        self.updates: list[float] = []
        library, _, option = name.partition("_")
        parameters = list(self.module.parameters())
        if library == "torch":
            self.module = TorchDDP(self.module)
        elif library == "apex":
            self.module = ApexDDP(self.module)
        kind, arguments = OPTIMIZERS[optimizer]
        self.others: torch.optim.Optimizer | None = None
        if optimizer == "muon":  # Muon takes only matrices
            rest = [p for p in parameters if p.ndim != 2]
            parameters = [p for p in parameters if p.ndim == 2]
            if rest:
                self.others = torch.optim.AdamW(rest, lr=1e-4, fused=True)
        self.optimizer: Any
        if option == "zero":
            self.optimizer = ZeroRedundancyOptimizer(parameters, kind, **arguments)
        elif option == "sharded":
            self.optimizer = ShardedOptimizer(parameters, kind, **arguments)
        else:
            self.optimizer = kind(parameters, **arguments)

    def step(self) -> None:
        self.module.zero_grad()
        self.module(self.batch).float().square().mean().backward()
        begin = time.perf_counter()
        if self.others is not None:
            self.others.step()
        self.optimizer.step()
        if self.device == "cpu":  # a GPU runs later than the call
            self.updates.append(time.perf_counter() - begin)

    def state_megabytes(self) -> float:
        """The size of the optimizer's state on this rank. ZeroRedundancyOptimizer keeps it in
        ``optim``."""
        held = getattr(self.optimizer, "optim", self.optimizer).state
        tensors = [t for state in held.values() for t in state.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) / 1e6


def measure(
    model_name: str,
    names: list[str],
    optimizer: str,
    device: str,
    rounds: int,
    warmup: int,
    seconds: float,
) -> dict[str, Any]:
    """Time every variant ``rounds`` times, or fewer if ``seconds`` run out. Collective."""
    model, batch = models.make(model_name, device)
    variants = [Variant(name, optimizer, model, batch) for name in names]
    turns = harness.Turns(device)
    for _ in range(warmup):
        for variant in variants:
            turns.timed(variant.step)
    for variant in variants:
        variant.updates.clear()
    times = turns.take([v.step for v in variants], rounds, seconds)
    columns = {v.name: column for v, column in zip(variants, times, strict=True)}
    updates = [v.updates for v in variants]
    if device == "cpu":
        updates = turns.slowest(updates)
    sizes = [size for (size,) in turns.slowest([[v.state_megabytes()] for v in variants])]
    result: dict[str, Any] = {
        "model": model_name,
        "title": f"{models.MODELS[model_name][0]}, {optimizer}",
        "optimizer": optimizer,
        "base": BASE,
        "megabytes": round(models.megabytes(model), 1),
        "parameters": sum(1 for _ in model.parameters()),
        "rounds": len(times[0]),
        "variants": {},
    }
    for variant, of_variant, size in zip(variants, updates, sizes, strict=True):
        column = columns[variant.name]
        entry: dict[str, Any] = {
            "seconds": harness.quartiles(column),
            "raw_seconds": column,
            "update": harness.quartiles(of_variant) if of_variant else None,
            "state_megabytes": round(size, 2),
        }
        if BASE in columns:
            entry["ratio"] = harness.ratios(column, columns[BASE])
        result["variants"][variant.name] = entry
    return result


def report(result: dict[str, Any]) -> str:
    head = ["variant", "step, ms (quartiles)", "ratio (quartiles)", "update, ms", "state, MB"]
    rows = [
        [
            TITLES[name],
            harness.show(entry["seconds"], 1e3),
            harness.show(entry["ratio"], digits=3) if "ratio" in entry else "",
            harness.show(entry["update"], 1e3) if entry["update"] else "",
            f"{entry['state_megabytes']:g}",
        ]
        for name, entry in result["variants"].items()
    ]
    return (
        f"\n### {result['title']} ({result['parameters']} parameters, {result['megabytes']:g} MB), "
        f"{result['rounds']} rounds\n\n{harness.table(head, rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=list(models.MODELS),
                        default=["small", "resnet18", "transformer", "linears"])  # fmt: skip
    parser.add_argument("--variants", nargs="+", choices=list(TITLES),
                        default=list(TITLES))  # fmt: skip
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS),
                        default=["adamw_fused", "adamw"])  # fmt: skip
    parser.add_argument("--rounds", type=harness.positive_int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--seconds", type=harness.positive_float, default=120.0)
    harness.add_arguments(parser, "sharded")
    arguments = parser.parse_args()
    name = arguments.name
    for optimizer in arguments.optimizers:
        arguments.name = name if len(arguments.optimizers) == 1 else f"{name}-{optimizer}"
        options = (arguments.variants, optimizer, arguments.device, arguments.rounds,
                   arguments.warmup, arguments.seconds)  # fmt: skip
        harness.run_models(arguments, TITLES, measure, options, report)


if __name__ == "__main__":
    main()
