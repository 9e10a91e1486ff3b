# SPDX-License-Identifier: BSD-3-Clause
"""Compares the step time of data-parallel training with torch's DistributedDataParallel and apex's.

    python benchmarks/ddp.py                        # two ranks over Gloo on this machine
    python benchmarks/ddp.py --ranks 1 --device cuda --backend nccl
    python benchmarks/ddp.py --models resnet18 --bucket-mb 1 5 25

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
    "flat": "backward, then one flat all-reduce",
    "comm": "one all-reduce in place, alone",
    "forward": "forward alone",
}
ALONE = ("none", "comm", "forward")  # only the communication, or everything but it
SWEPT = ["none", "forward", "comm", "torch", "apex", "flat"]  # in addition to bucket sizes
OPTIONS: dict[str, dict[str, Any]] = {
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "weighted": {"gradient_average": "weighted"},
    "unchecked": {"replica_check_every": 0},
}
#: Options of this library whose cost is measured if they are named.
SWITCHES = ("apex_weighted", "apex_unchecked")


def title(variant: str) -> str:
    base, _, size = variant.partition("@")
    return TITLES[base] + (f", {size} MiB buckets" if size else "")


def _loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


def _flat_all_reduce(module: nn.Module) -> None:
    """The simplest correct method: one all-reduce of all gradients after backward."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch.cat([grad.view(-1) for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(pieces, grads, strict=True)])


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

    def __init__(
        self, name: str, model: nn.Module, batch: Tensor, device: str, keep_gradients: bool
    ) -> None:
        self.name = name
        self.keep_gradients = keep_gradients
        self.batch = batch
        self.module = models.twin(model)
        self.after: Callable[[], None] | None = None
        self.around: Callable[[], Any] = contextlib.nullcontext
        self.flat: Tensor | None = None
        self.only_forward = False
        kind, _, size = name.partition("@")
        library, _, option = kind.partition("_")
        options = dict(OPTIONS.get(option, {}))
        if size:
            options["bucket_cap_mb"] = float(size)
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
        elif library == "flat":
            self.after = lambda: _flat_all_reduce(self.module)
        elif library == "comm":
            first = next(model.parameters())
            count = sum(p.numel() for p in model.parameters())
            self.flat = torch.zeros(count, dtype=first.dtype, device=first.device)
        elif library == "forward":
            self.only_forward = True

    def step(self) -> None:
        if self.flat is not None:
            dist.all_reduce(self.flat)
            return
        self.module.zero_grad(set_to_none=not self.keep_gradients)
        loss = _loss(self.module(self.batch))
        if self.only_forward:
            return
        with self.around():
            loss.backward()
        if self.after is not None:
            self.after()

    def counters(self) -> dict[str, int] | None:
        return self.module.statistics() if isinstance(self.module, ApexDDP) else None


def plan_bytes(module: nn.Module) -> list[int] | None:
    """Bytes of each bucket of an apex wrapper, in launch order."""
    plan = module._reducer.plan() if isinstance(module, ApexDDP) else None
    if plan is None:
        return None
    size = [p.numel() * p.element_size() for p in module.module.parameters()]
    return [sum(size[i] for i in bucket) for bucket in plan]


def _make_variants(
    names: list[str], model: nn.Module, batch: Tensor, device: str, keep_gradients: bool
) -> tuple[list[Variant], dict[str, str]]:
    variants, left_out = [], {}
    for name in names:
        try:
            variants.append(Variant(name, model, batch, device, keep_gradients))
        except (TypeError, ValueError) as error:  # an option that this version does not have
            left_out[name] = str(error)
    return variants, left_out


def per_step(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    steps = max(1, after["backwards"] - before["backwards"])
    counts = {key: (after[key] - before[key]) / steps for key in after if key != "backwards"}
    counts["collectives"] = counts["launched_in_backward"] + counts["launched_at_end"]
    return counts


def _overlaps(columns: dict[str, list[float]], name: str) -> list[float]:
    rows = zip(columns["none"], columns["comm"], columns[name], strict=True)
    return [(compute + comm - step) / min(compute, comm) for compute, comm, step in rows]


def _best(columns: dict[str, list[float]]) -> dict[str, Any]:
    """A lower bound for any plan with these times: forward + max(backward, all-reduce)."""
    step = []
    for forward, compute, comm in zip(
        columns["forward"], columns["none"], columns["comm"], strict=True
    ):
        step.append(forward + max(compute - forward, comm))
    overlap = _overlaps({**columns, "best": step}, "best")
    return {"seconds": harness.quartiles(step), "overlap": harness.quartiles(overlap)}


def measure(
    model_name: str,
    names: list[str],
    device: str,
    rounds: int,
    warmup: int,
    seconds: float,
    keep_gradients: bool = False,
) -> dict[str, Any]:
    """Time every variant ``rounds`` times, or fewer if ``seconds`` run out. Collective."""
    model, batch = models.make(model_name, device)
    variants, left_out = _make_variants(names, model, batch, device, keep_gradients)
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
        "left_out": left_out,
        "variants": {},
    }
    for variant in variants:
        column = columns[variant.name]
        entry: dict[str, Any] = {"seconds": harness.quartiles(column), "raw_seconds": column}
        if BASE in columns:
            entry["ratio"] = harness.ratios(column, columns[BASE])
        if {"none", "comm"} <= set(columns) and variant.name not in ALONE:
            entry["overlap"] = harness.quartiles(_overlaps(columns, variant.name))
        after = variant.counters()
        if after is not None:
            entry["per_step"] = per_step(before[variant.name], after)
            entry["plan_bytes"] = plan_bytes(variant.module)
        result["variants"][variant.name] = entry
    if {"none", "forward", "comm"} <= set(columns):
        result["best"] = _best(columns)
    if "comm" in columns:
        seconds_alone = result["variants"]["comm"]["seconds"]["median"]
        result["comm_gbit_per_s"] = sent_gbit(model) / seconds_alone
    if "apex" in columns and BASE in columns:
        result["ahead_in_rounds"] = sum(
            ours < theirs for ours, theirs in zip(columns["apex"], columns[BASE], strict=True)
        )
    return result


def sent_gbit(model: nn.Module) -> float:
    """The data that each rank sends in an all-reduce of all gradients, for any algorithm."""
    ranks = dist.get_world_size()
    return 2 * (ranks - 1) / ranks * models.megabytes(model) * 8e-3


def sizes(plan: list[int]) -> str:
    """Bucket sizes in launch order. The middle of a long list is replaced by its length."""
    shown = [f"{size / (1 << 20):.3g}" for size in plan]
    if len(shown) > 16:
        shown[8:-6] = [f"({len(shown) - 14} more)"]
    return f"{len(plan)}: {', '.join(shown)}"


def report(result: dict[str, Any]) -> str:
    variants = result["variants"]
    with_overlap = any("overlap" in entry for entry in variants.values())
    head = ["variant", "step, ms (quartiles)", "ratio to torch (quartiles)"]
    head += ["overlap"] * with_overlap + ["collectives", "copies"]
    rows = []
    for name, entry in variants.items():
        row = [title(name), harness.show(entry["seconds"], 1e3)]
        row.append(harness.show(entry["ratio"], digits=3) if "ratio" in entry else "")
        if with_overlap:
            row.append(harness.show(entry["overlap"]) if "overlap" in entry else "")
        counts = entry.get("per_step", {})
        row += [
            f"{counts[key]:g}" if key in counts else ""
            for key in ("collectives", "gradients_copied")
        ]
        rows.append(row)
    text = (
        f"\n### {result['title']} ({result['parameters']} parameters, {result['megabytes']:g} MB), "
        f"{result['rounds']} rounds\n\n{harness.table(head, rows)}"
    )
    if result.get("comm_gbit_per_s"):
        rate = result["comm_gbit_per_s"]
        text += f"\n\nThe all-reduce alone sends {rate:.3f} Gbit/s out of each rank."
    if "best" in result:
        best = result["best"]
        text += (
            " Forward, then the longer of backward and all-reduce, would take "
            f"{harness.show(best['seconds'], 1e3)} ms: overlap {harness.show(best['overlap'])}."
        )
    plan = variants.get("apex", {}).get("plan_bytes")
    if with_overlap and plan:
        text += f"\n\nBuckets of apex, in MiB: {sizes(plan)}."
    for name, reason in result["left_out"].items():
        text += f"\n\n{title(name)} left out: {reason}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=list(models.MODELS))
    parser.add_argument("--variants", nargs="+", choices=list(TITLES), metavar="VARIANT",
                        help=f"of: {' '.join(TITLES)}")  # fmt: skip
    parser.add_argument("--bucket-mb", nargs="+", metavar="MB", default=[],
                        help="also torch and apex with such buckets, and the overlap")  # fmt: skip
    parser.add_argument("--rounds", type=harness.positive_int, help="default 60, with --quick 8")
    parser.add_argument("--warmup", type=int, help="untimed steps, default 5, with --quick 3")
    parser.add_argument(
        "--seconds", type=harness.positive_float, help="at most, per model; default 180"
    )
    parser.add_argument("--keep-gradients", action="store_true",
                        help="zero gradients in place instead of dropping them")  # fmt: skip
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

    left_out = ("comm", "forward", "apex_group", *SWITCHES)
    names = arguments.variants or [name for name in TITLES if name not in left_out]
    if arguments.bucket_mb:
        names = list(arguments.variants or SWEPT)
        names += [f"{kind}@{size}" for size in arguments.bucket_mb for kind in ("torch", "apex")]
    options = (names, arguments.device, arguments.rounds, arguments.warmup, arguments.seconds,
               arguments.keep_gradients)  # fmt: skip
    harness.run_models(arguments, TITLES, measure, options, report)


if __name__ == "__main__":
    main()
