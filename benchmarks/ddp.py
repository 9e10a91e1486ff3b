# SPDX-License-Identifier: BSD-3-Clause
"""Compares the step time of data-parallel training with torch's DistributedDataParallel and apex's.

    python benchmarks/ddp.py                        # two ranks over Gloo on this machine
    python benchmarks/ddp.py --ranks 1 --device cuda --backend nccl

All variants run in one process group and take turns step by step (A B C, B C A, ...), with a
barrier before and after each step. A disturbance of the machine therefore affects all of them. A
step is zero_grad(), forward and backward, without an optimizer; its time is that of the slowest
rank. Ratios are medians over rounds of a time divided by that of torch's default in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import harness
import models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex.parallel import DistributedDataParallel as ApexDDP

BASE = "torch"
TITLES = {
    "none": "no DDP",
    "torch": "torch",
    "torch_view": "torch, gradient_as_bucket_view",
    "torch_static": "torch, static_graph",
    "torch_unused": "torch, find_unused_parameters",
    "torch_backend": "torch, on the backend apex",
    "apex": "apex",
    "apex_view": "apex, gradient_as_bucket_view",
    "apex_group": "apex, APEX_HOST_CHANNEL=0",
    "apex_weighted": "apex, weights",
    "apex_unchecked": "apex, replica_check_every=0",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "weighted": {"gradient_average": "weighted"},
    "unchecked": {"replica_check_every": 0},
}
#: Options of this library whose cost is measured if they are named.
SWITCHES = ("apex_weighted", "apex_unchecked")


def _loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


@contextlib.contextmanager
def _host_channel(allowed: bool) -> Iterator[None]:
    """Whether a wrapper created inside may use the host channel. It decides once, with all
    ranks."""
    before = os.environ.get("APEX_HOST_CHANNEL")
    if not allowed:
        os.environ["APEX_HOST_CHANNEL"] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("APEX_HOST_CHANNEL", None)
        else:
            os.environ["APEX_HOST_CHANNEL"] = before


class Variant:
    """One way to train a model. ``step()`` is timed."""

    def __init__(self, name: str, model: nn.Module, batch: Tensor, device: str) -> None:
        self.name = name
        self.batch = batch
        self.module = models.twin(model)
        self.around: Callable[[], Any] = contextlib.nullcontext
        library, _, option = name.partition("_")
        options = dict(OPTIONS.get(option, {}))
        if library == "torch":
            ids = [torch.cuda.current_device()] if device == "cuda" else None
            if option == "backend":
                options["process_group"] = dist.new_group(backend="apex")
            self.module = TorchDDP(self.module, device_ids=ids, **options)
        elif library == "apex":
            with _host_channel(option != "group"):
                self.module = wrapped = ApexDDP(self.module, **options)
            if option == "weighted":
                self.around = lambda: wrapped.weight(len(batch))

    def step(self) -> None:
        self.module.zero_grad()
        loss = _loss(self.module(self.batch))
        with self.around():
            loss.backward()

    def counters(self) -> dict[str, int] | None:
        return self.module.statistics() if isinstance(self.module, ApexDDP) else None


def per_step(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    steps = max(1, after["backwards"] - before["backwards"])
    counts = {key: (after[key] - before[key]) / steps for key in after if key != "backwards"}
    counts["collectives"] = counts["launched_in_backward"] + counts["launched_at_end"]
    return counts


def measure(
    model_name: str,
    names: list[str],
    device: str,
    rounds: int,
    warmup: int,
    seconds: float,
) -> dict[str, Any]:
    """Time every variant ``rounds`` times, or fewer if ``seconds`` run out. Collective."""
    model, batch = models.make(model_name, device)
    variants = [Variant(name, model, batch, device) for name in names]
    turns = harness.Turns(device)
    for _ in range(warmup):
        for variant in variants:
            turns.timed(variant.step)
    before = {v.name: v.counters() for v in variants}
    times = turns.take([v.step for v in variants], rounds, seconds)
    columns = {v.name: column for v, column in zip(variants, times, strict=True)}
    result: dict[str, Any] = {
        "model": model_name,
        "title": models.MODELS[model_name][0],
        "megabytes": round(models.megabytes(model), 1),
        "parameters": sum(1 for _ in model.parameters()),
        "rounds": len(times[0]),
        "variants": {},
    }
    for variant in variants:
        column = columns[variant.name]
        entry: dict[str, Any] = {"seconds": harness.quartiles(column), "raw_seconds": column}
        if BASE in columns:
            entry["ratio"] = harness.ratios(column, columns[BASE])
        after = variant.counters()
        if after is not None:
            entry["per_step"] = per_step(before[variant.name], after)
        result["variants"][variant.name] = entry
    if "apex" in columns and BASE in columns:
        result["ahead_in_rounds"] = sum(
            ours < theirs for ours, theirs in zip(columns["apex"], columns[BASE], strict=True)
        )
    return result


def report(result: dict[str, Any]) -> str:
    head = ["variant", "step, ms (quartiles)", "ratio to torch (quartiles)", "collectives"]
    rows = []
    for name, entry in result["variants"].items():
        ratio = harness.show(entry["ratio"], digits=3) if "ratio" in entry else ""
        count = f"{entry['per_step']['collectives']:g}" if "per_step" in entry else ""
        rows.append([TITLES[name], harness.show(entry["seconds"], 1e3), ratio, count])
    return (
        f"\n### {result['title']} ({result['parameters']} parameters, {result['megabytes']:g} MB), "
        f"{result['rounds']} rounds\n\n{harness.table(head, rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=list(models.MODELS))
    parser.add_argument("--variants", nargs="+", choices=list(TITLES), metavar="VARIANT",
                        help=f"of: {' '.join(TITLES)}")  # fmt: skip
    parser.add_argument("--rounds", type=harness.positive_int, help="default 60, with --quick 8")
    parser.add_argument("--warmup", type=int, help="untimed steps, default 5, with --quick 3")
    parser.add_argument(
        "--seconds", type=harness.positive_float, help="at most, per model; default 180"
    )
    parser.add_argument("--quick", action="store_true",
                        help="two models unless --models, 8 rounds, 20 s")  # fmt: skip
    harness.add_arguments(parser, "ddp")
    arguments = parser.parse_args()
    everything = {"models": list(models.MODELS), "rounds": 60, "warmup": 5, "seconds": 180.0}
    quick = {"models": ["small", "resnet18"], "rounds": 8, "warmup": 3, "seconds": 20.0}
    for key, value in (quick if arguments.quick else everything).items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")

    left_out = ("apex_group", *SWITCHES)
    names = arguments.variants or [name for name in TITLES if name not in left_out]
    options = (names, arguments.device, arguments.rounds, arguments.warmup, arguments.seconds)
    harness.run_models(arguments, TITLES, measure, options, report)


if __name__ == "__main__":
    main()
