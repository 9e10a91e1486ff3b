# SPDX-License-Identifier: BSD-3-Clause
"""Measures the cost of a data-parallel wrapper without communication: the world size is 1.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --device cuda --backend nccl
    python benchmarks/overhead.py --instructions      # counts with valgrind instead, no times

Prints, for torch's DistributedDataParallel and apex's:

- Time added to a step, in microseconds per step and per parameter, from a linear fit over steps
  with different numbers of parameters. The model is one autograd node that returns given gradients,
  so only their accumulation and the wrapper remain.
- Time added to a wrapped forward, of one small linear layer and of 40 batch norms. torch broadcasts
  their buffers before every forward, and apex does so on request.
- With --instructions, instead of all that, machine instructions per step and per parameter, which
  do not depend on the load of the machine: see instructions.py.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex.parallel import DistributedDataParallel as ApexDDP

Wrap = Callable[[nn.Module], nn.Module]

WRAPPERS: dict[str, tuple[str, Wrap]] = {
    "none": ("no DDP", lambda module: module),
    "torch": ("torch", lambda module: TorchDDP(module)),
    "torch_view": (
        "torch, gradient_as_bucket_view",
        lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    ),
    "torch_static": ("torch, static_graph", lambda module: TorchDDP(module, static_graph=True)),
    "apex": ("apex", lambda module: ApexDDP(module)),
    "apex_view": (
        "apex, gradient_as_bucket_view",
        lambda module: ApexDDP(module, gradient_as_bucket_view=True),
    ),
    "apex_weighted": (
        "apex, with a weight in each step",
        lambda module: ApexDDP(module, gradient_average="weighted"),
    ),
    "apex_buffers": (
        "apex, broadcast_buffers",
        lambda module: ApexDDP(module, broadcast_buffers=True),
    ),
}
STEP_WRAPPERS = [
    *("none", "torch", "torch_view", "torch_static", "apex", "apex_view", "apex_weighted"),
]
FORWARDS = 20  # per measurement
FORWARD_WRAPPERS = ["none", "torch", "apex", "apex_buffers"]


class _HandOut(torch.autograd.Function):
    """A scalar whose gradient with respect to each parameter is a given tensor."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


class Parameters(nn.Module):
    """``count`` parameters of ``numel`` elements, with almost no computation."""

    def __init__(self, count: int, numel: int, device: str) -> None:
        super().__init__()
        self.items = nn.ParameterList(
            nn.Parameter(torch.zeros(numel, device=device)) for _ in range(count)
        )
        self.flat = list(self.items)
        self.gradients = [torch.ones(numel, device=device) for _ in range(count)]

    def forward(self) -> Tensor:
        return _HandOut.apply(self.gradients, *self.flat)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _take_turns(
    calls: dict[str, Callable[[], None]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds per call. Each round calls each function once, in rotated order."""
    names = list(calls)
    for _ in range(5):
        for name in names:
            calls[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for k in range(len(names)):
            name = names[(i + k) % len(names)]
            _synchronize(device)
            start = time.perf_counter()
            calls[name]()
            _synchronize(device)
            times[name].append(time.perf_counter() - start)
    return times


def _stepper(
    wrapper: str, count: int, numel: int, device: str
) -> tuple[nn.Module, Callable[[], None]]:
    module = WRAPPERS[wrapper][1](Parameters(count, numel, device))

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module().backward()

    def weighted_step() -> None:
        module.zero_grad(set_to_none=True)
        loss = module()
        with module.weight(4):
            loss.backward()

    return module, weighted_step if wrapper == "apex_weighted" else step


def _added(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Microseconds in addition to the variant without DDP, per round."""
    base = times["none"]
    return {
        name: harness.quartiles([(t - b) * 1e6 for t, b in zip(column, base, strict=True)])
        for name, column in times.items()
        if name != "none"
    }


def measure_steps(device: str, rounds: int, numels: list[int], counts: list[int]) -> list[dict]:
    results = []
    for numel in numels:
        points: dict[str, list[float]] = {}
        base, raw = [], {}
        for count in counts:
            # Fewer large ones: copies of 100 x 65536 floats are 26 MB per variant.
            calls = {name: _stepper(name, count, numel, device)[1] for name in STEP_WRAPPERS}
            times = _take_turns(calls, rounds, device)
            raw[str(count)] = _added(times)
            base.append(harness.quartiles(times["none"])["median"] * 1e6)
            for name, added in raw[str(count)].items():
                points.setdefault(name, []).append(added["median"])
        entry: dict[str, Any] = {"numel": numel, "counts": counts, "added_us": raw, "none_us": base}
        entry["line"] = {}
        for name, medians in points.items():
            slope, intercept = numpy.polyfit(counts, medians, 1)
            entry["line"][name] = {
                "per_parameter_us": float(slope),
                "per_step_us": float(intercept),
            }
        results.append(entry)
    return results


def measure_forwards(device: str, rounds: int) -> list[dict]:
    linear = nn.Linear(8, 8).to(device)
    norms = nn.Sequential(*(nn.BatchNorm1d(64) for _ in range(40))).to(device)
    results = []
    for title, module, batch in (
        ("one linear layer", linear, torch.randn(4, 8, device=device)),
        ("40 batch norms", norms, torch.randn(8, 64, device=device)),
    ):
        calls: dict[str, Callable[[], None]] = {}
        for name in FORWARD_WRAPPERS:
            wrapped = WRAPPERS[name][1](copy.deepcopy(module))

            def forward(wrapped: nn.Module = wrapped, batch: Tensor = batch) -> None:
                for _ in range(FORWARDS):
                    wrapped(batch)

            calls[name] = forward
        times = {
            n: [t / FORWARDS for t in c] for n, c in _take_turns(calls, rounds, device).items()
        }
        own = harness.quartiles(times["none"])["median"] * 1e6
        results.append({"title": title, "none_us": own, "added_us": _added(times)})
    return results


def measure(device: str, rounds: int, numels: list[int], counts: list[int]) -> dict[str, Any]:
    return {
        "steps": measure_steps(device, rounds, numels, counts),
        "forwards": measure_forwards(device, rounds),
    }


# --- report ---


def report(result: dict[str, Any]) -> str:
    text = []
    for entry in result["steps"]:
        rows = [
            [
                WRAPPERS[name][0],
                f"{line['per_step_us']:.1f}",
                f"{line['per_parameter_us']:.2f}",
                harness.show(entry["added_us"][str(entry["counts"][-1])][name], digits=1),
            ]
            for name, line in entry["line"].items()
        ]
        head = ["added", "us a step", "us a parameter", f"us, {entry['counts'][-1]} parameters"]
        title = f"Step, parameters of {entry['numel']} elements"
        text.append(f"\n### {title}\n\n{harness.table(head, rows)}")
    for entry in result["forwards"]:
        rows = [[WRAPPERS[n][0], harness.show(a, digits=1)] for n, a in entry["added_us"].items()]
        text.append(
            f"\n### Forward of {entry['title']} (its own: {entry['none_us']:.1f} us)\n\n"
            + harness.table(["added", "us (quartiles)"], rows)
        )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--rounds", type=harness.positive_int, default=100)
    parser.add_argument("--numel", type=harness.positive_int, nargs="+", default=[64, 4096, 65536])
    parser.add_argument("--counts", type=harness.positive_int, nargs="+", default=[20, 50, 100])
    parser.add_argument("--instructions", action="store_true",
                        help="count instructions with valgrind, no times")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="20 rounds, sizes 64 and 4096")
    parser.add_argument("--output", help="folder for NAME.json (default: only print)")
    parser.add_argument("--name", help="file name without suffix (default: overhead, with "
                        "--instructions overhead-instructions)")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.name is None:
        arguments.name = "overhead-instructions" if arguments.instructions else "overhead"
    if arguments.quick:
        arguments.rounds, arguments.numel = 20, [64, 4096]
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    described = harness.machine()
    if arguments.instructions:
        import instructions

        lacking = instructions.missing()
        if lacking or arguments.device != "cpu":
            parser.error(f"--instructions: {lacking or 'only the processor is counted'}")
        result = {"instructions": instructions.measure()}
        print(instructions.report(result["instructions"]))
    else:
        result = harness.run(
            measure,
            1,
            arguments.backend,
            arguments.device,
            (arguments.device, arguments.rounds, arguments.numel, arguments.counts),
        )
        print(report(result))
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    complete = {"machine": described, "settings": settings, **result}
    harness.write(arguments.name, complete, arguments.output)
    if not arguments.instructions:
        harness.warn_if_busy(described)


if __name__ == "__main__":
    main()
