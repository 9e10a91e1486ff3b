# SPDX-License-Identifier: BSD-3-Clause
"""Random training programs: drawing from a seed, running on ranks, and float64 references.

A case is drawn from its seed alone: a graph of small layers (shared, checkpointed, of several
dtypes and layouts), options of the wrapper, and steps in which ranks skip different layers, freeze
parameters, accumulate, and run one or two backwards.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from ddp_support import check, dense, to_reference, wide, widen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex.parallel import DistributedDataParallel

WIDTH = 4
ROWS = 2

OPTIONS: list[dict[str, Any]] = [
    {},
    {},
    {"message_size": 1},
    {"message_size": 20},
    {"message_size": 40},
    {"bucket_cap_mb": 1e-4},
    {"delay_allreduce": True},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "message_size": 20},
    {"retain_allreduce_buffers": True, "message_size": 1},
    {"allreduce_always_fp32": True},
    {"allreduce_always_fp32": True, "gradient_as_bucket_view": True, "message_size": 20},
    {"gradient_average": False, "message_size": 20},
    {"gradient_average": False, "gradient_predivide_factor": 2.0},
    {"gradient_predivide_factor": 3.0, "message_size": 20},
    {"num_allreduce_streams": 2, "message_size": 10},
    {"_triggers": True},
    {"_triggers": True, "gradient_as_bucket_view": True},
]


class Layer(nn.Module):
    """One small operation on [ROWS, WIDTH], in its own dtype."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        elif kind == "scale":
            self.weight = nn.Parameter(torch.randn(WIDTH).to(dtype))
        elif kind == "scalar":
            self.weight = nn.Parameter(torch.randn(()).to(dtype))
        elif kind == "transposed":
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype).t())
        elif kind == "gaps":
            self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).to(dtype)[:, ::2])
        elif kind == "empty":
            self.weight = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
            self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=dtype))
        elif kind == "complex":
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        else:
            self.table = nn.Embedding(5, WIDTH, sparse=kind == "sparse", dtype=dtype)

    def forward(self, h: Tensor) -> Tensor:
        own = next(self.parameters()).dtype
        if self.kind == "linear":
            return self.inner(h.to(own))
        if self.kind in ("scale", "scalar"):
            return h.to(own) * self.weight
        if self.kind == "empty":
            return h.to(own) + self.weight.sum() + self.bias
        if self.kind == "complex":
            return (h.to(own) @ self.weight).real
        if self.kind in ("embedding", "sparse"):
            # Selected by sign, which low precision rarely changes. The case avoids the others.
            return self.table((h[:, 0] > 0).long()) + h.to(own)
        return h.to(own) @ self.weight


@dataclass
class Node:
    layer: int
    inputs: list[int]
    checkpoint: str | None


@dataclass
class Micro:
    synchronized: bool
    how: str  # no_sync, no_sync_backward, disable
    backward: str  # one, first_only, two_backwards, two_forwards
    skipped: list[list[bool]]  # [rank][node]


@dataclass
class Step:
    clear: str  # none, zeros, keep
    frozen: set[int] = field(default_factory=set)
    evaluate: bool = False
    micros: list[Micro] = field(default_factory=list)


@dataclass
class Case:
    seed: int
    world: int
    layers: list[tuple[str, torch.dtype]]
    nodes: list[Node]
    options: dict[str, Any]
    steps: list[Step]

    @property
    def narrow(self) -> bool:
        return any(is_narrow(dtype) for _, dtype in self.layers)


def is_narrow(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def world_of(seed: int) -> int:
    return 2 + seed % 3


def draw_case(seed: int) -> Case:
    rng = random.Random(seed)
    world = world_of(seed)
    dtypes = rng.choice(
        [[torch.float32]] * 4
        + [[torch.float64], [torch.float32, torch.float64], [torch.bfloat16], [torch.float16]]
        + [[torch.float32, torch.bfloat16, torch.float16, torch.float64]]
    )
    kinds = ["linear"] * 5 + ["scale", "scalar", "transposed", "gaps", "empty", "complex"]
    kinds += ["embedding", "sparse"]
    layers = [(rng.choice(kinds), rng.choice(dtypes)) for _ in range(rng.randint(1, 5))]
    # torch cannot add sparse tensors of these dtypes.
    layers = [("embedding" if k == "sparse" and is_narrow(d) else k, d) for k, d in layers]
    modes = rng.choice(
        [["one"], ["two_forwards"], ["one", "first_only"], ["one", "two_backwards", "first_only"],
         ["one", "two_forwards", "two_backwards"]]
    )  # fmt: skip
    options = rng.choice(OPTIONS)
    averages = options.get("gradient_average", True)
    if not averages:
        modes = [mode for mode in modes if mode != "two_backwards"]

    # A layer in reentrant segments must be used once, or the same number of times in each backward
    # as in the one that recorded the plan.
    checkpoints = rng.choice([[None], [None, None, "non-reentrant"], [None, "reentrant"]])
    nodes = []
    for i in range(rng.randint(1, 7)):
        inputs = sorted({rng.randint(0, i) for _ in range(rng.choice([1, 1, 2]))})
        nodes.append(Node(rng.randrange(len(layers)), inputs, rng.choice(checkpoints)))
    reentrant = {node.layer for node in nodes if node.checkpoint == "reentrant"}
    if reentrant:
        modes = [modes[0]] if modes[0] in ("one", "two_forwards") else ["one"]
    skipping = rng.choice([0.0, 0.0, 0.2, 0.5])
    uses = [sum(node.layer == layer for node in nodes) for layer in reentrant]
    if reentrant and (modes == ["two_forwards"] or max(uses) > 1):
        skipping = 0.0
    alike = rng.random() < 0.3

    def skips() -> list[list[bool]]:
        def row() -> list[bool]:
            return [rng.random() < skipping for _ in nodes]

        first = row()
        return [first if alike or rank == 0 else row() for rank in range(world)]

    parameters = sum(len(list(Layer(*layer).parameters())) for layer in layers)
    steps = []
    frozen: set[int] = set()
    for _ in range(rng.randint(2, 4)):
        step = Step(clear=rng.choice(["none", "none", "zeros"] + ["keep"] * averages))
        if rng.random() < 0.15:
            frozen.update(rng.sample(range(parameters), rng.randint(1, parameters)))
        if rng.random() < 0.3:
            frozen = set()
        step.frozen = set(frozen)
        step.evaluate = rng.random() < 0.1
        count = rng.choice([1, 1, 1, 2, 3])
        for micro in range(count):
            step.micros.append(
                Micro(
                    synchronized=micro == count - 1 and rng.random() < 0.93,
                    how=rng.choice(["no_sync", "no_sync_backward", "disable"]),
                    backward=rng.choice(modes),
                    skipped=skips(),
                )
            )
        steps.append(step)
    return Case(seed, world, layers, nodes, options, steps)


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*layer) for layer in case.layers)
        self.nodes = case.nodes

    def forward(self, x: Tensor, skipped: list[bool]) -> dict[str, list[Tensor]]:
        values = [x * 1.0]  # if an output is a leaf, there is no node to detect its backward
        for node, skip in zip(self.nodes, skipped, strict=True):
            h = values[node.inputs[0]]
            if not skip:
                for i in node.inputs[1:]:
                    h = h + 0.5 * values[i].to(h.dtype)
                layer = self.layers[node.layer]
                if node.checkpoint is None:
                    y = layer(h)
                else:
                    y = checkpoint(layer, h, use_reentrant=node.checkpoint == "reentrant")
                h = torch.tanh(y.to(h.dtype)) + 0.5 * h
            values.append(h)
        return {"out": [values[-1], values[len(values) // 2]]}


def build(case: Case) -> Net:
    torch.manual_seed(case.seed)
    return Net(case)


def batch(case: Case, rank: int, step: int, micro: int, which: int) -> Tensor:
    generator = torch.Generator().manual_seed(((step * 10 + micro) * 10 + rank) * 2 + which)
    dtype = torch.float64 if case.layers[0][1] == torch.float64 else torch.float32
    return torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()


def losses(output: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor]:
    last, middle = output["out"]
    return last.square().mean(), torch.sin(middle).mean()


def backwards(model: nn.Module, case: Case, rank: int, step: int, m: int, to: Any) -> list[Tensor]:
    """The forwards of one micro-batch, and the losses of its backwards, in order."""
    micro = case.steps[step].micros[m]
    skipped = micro.skipped[rank]
    first, second = losses(model(to(batch(case, rank, step, m, 0)), skipped))
    if micro.backward == "first_only":
        return [first]
    if micro.backward == "two_backwards":
        return [first, second]
    if micro.backward == "two_forwards":
        third, fourth = losses(model(to(batch(case, rank, step, m, 1)), skipped))
        return [first + second + third - fourth]
    return [first + second]


def _freeze(parameters: list[nn.Parameter], step: Step) -> None:
    for index, parameter in enumerate(parameters):
        parameter.requires_grad_(index not in step.frozen)


# --- the program as a user writes it ---

Grads = list[Tensor | None]


def run_case(case: Case, rank: int) -> list[list[Grads]]:
    """Gradients after each step, [step][rank], as high-precision copies."""
    model = build(case)
    parameters = list(model.parameters())
    options = dict(case.options)
    if options.pop("_triggers", False):
        options["allreduce_trigger_params"] = parameters[:: max(1, len(parameters) // 2)]
    ddp = DistributedDataParallel(model, **options)
    record = []
    for s, step in enumerate(case.steps):
        if step.clear != "keep":
            ddp.zero_grad(set_to_none=step.clear == "none")
        _freeze(parameters, step)
        if step.evaluate:
            with torch.no_grad():
                ddp(batch(case, rank, s, 0, 0), [False] * len(case.nodes))
        for m, micro in enumerate(step.micros):
            _run_micro(ddp, case, rank, s, m, micro)
        record.append(_gather([p.grad for p in parameters], parameters))
    return record


def _run_micro(
    ddp: DistributedDataParallel, case: Case, rank: int, step: int, m: int, micro: Micro
) -> None:
    def leave_alone(tensor: Tensor) -> Tensor:
        return tensor

    quiet = contextlib.nullcontext() if micro.synchronized else ddp.no_sync()
    if not micro.synchronized and micro.how == "no_sync_backward":
        todo = backwards(ddp, case, rank, step, m, leave_alone)
        with quiet:
            _go(todo)
    elif not micro.synchronized and micro.how == "disable":
        ddp.disable_allreduce()
        _go(backwards(ddp, case, rank, step, m, leave_alone))
        ddp.enable_allreduce()
    else:
        with quiet:
            _go(backwards(ddp, case, rank, step, m, leave_alone))


def _go(todo: list[Tensor]) -> None:
    for i, loss in enumerate(todo):
        loss.backward(retain_graph=i + 1 < len(todo))


def _gather(grads: Grads, parameters: list[nn.Parameter]) -> list[Grads]:
    """Every rank's gradients, in one collective."""
    mask = torch.tensor([grad is not None for grad in grads], dtype=torch.float64)
    flat = [mask]
    for grad, parameter in zip(grads, parameters, strict=True):
        value = torch.zeros_like(parameter) if grad is None else dense(grad)
        value = value.detach().to(wide(value.dtype))
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        flat.append(value.reshape(-1))
    mine = torch.cat(flat)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [_unpack(vector, parameters) for vector in everyone]


def _unpack(vector: Tensor, parameters: list[nn.Parameter]) -> Grads:
    present, offset, grads = vector[: len(parameters)].tolist(), len(parameters), []
    for there, parameter in zip(present, parameters, strict=True):
        count = parameter.numel() * (2 if parameter.is_complex() else 1)
        value = vector[offset : offset + count]
        if parameter.is_complex():
            value = torch.view_as_complex(value.reshape(-1, 2).clone())
        grads.append(value.reshape(parameter.shape) if there else None)
        offset += count
    return grads


# --- the same program in one process ---


def check_case(case: Case, record: list[list[Grads]]) -> None:
    """Compare a record of :func:`run_case` with every rank's work, done here sequentially.

    The model runs in float64. If it has float16 or bfloat16 layers, it runs in its own dtypes, so
    that the averaging is compared and not the rounding of those layers.
    """
    model = build(case) if case.narrow else to_reference(build(case))
    to = (lambda tensor: tensor) if case.narrow else widen
    parameters = list(model.parameters())
    dtypes = [p.dtype for p in build(case).parameters()]
    ranks, count = range(case.world), len(parameters)
    local: list[Grads] = [[None] * count for _ in ranks]
    touched: list[set[int]] = [set() for _ in ranks]
    size = [0.0] * count
    times = 1.0
    if not case.options.get("gradient_average", True):
        times = case.world / case.options.get("gradient_predivide_factor", 1.0)

    for s, step in enumerate(case.steps):
        if step.clear == "none":
            local = [[None] * count for _ in ranks]
        elif step.clear == "zeros":
            local = [[None if g is None else torch.zeros_like(g) for g in row] for row in local]
        for m, micro in enumerate(step.micros):
            todo = []
            for rank in ranks:
                _freeze(parameters, step)
                todo.append(backwards(model, case, rank, s, m, to))
            for b in range(len(todo[0])):
                fired: list[set[int]] = []
                for rank in ranks:
                    model.zero_grad()
                    _freeze(parameters, step)
                    todo[rank][b].backward(retain_graph=b + 1 < len(todo[rank]))
                    fired.append(_add(local[rank], parameters, size))
                if not micro.synchronized:
                    for rank in ranks:
                        touched[rank] |= fired[rank]
                    continue
                _average(local, [f | t for f, t in zip(fired, touched, strict=True)], times)
                touched = [set() for _ in ranks]
        for rank in ranks:
            for i in range(count):
                what = f"step {s}, rank {rank}, parameter {i}"
                _compare(
                    record[s][rank][i], local[rank][i], size[i] * max(1.0, times), dtypes[i], what
                )


def _add(local: Grads, parameters: list[nn.Parameter], size: list[float]) -> set[int]:
    fired = set()
    for i, parameter in enumerate(parameters):
        if parameter.grad is None:
            continue
        fired.add(i)
        grad = dense(parameter.grad)
        grad = grad.to(wide(grad.dtype))
        local[i] = grad.clone() if local[i] is None else local[i] + grad
        if grad.numel():
            size[i] = max(size[i], grad.abs().max().item(), local[i].abs().max().item())
    return fired


def _average(local: list[Grads], used: list[set[int]], times: float) -> None:
    contributing = [
        {i for i in u if row[i] is not None} for u, row in zip(used, local, strict=True)
    ]
    for i in set().union(*contributing):
        total = sum(row[i] for row in local if row[i] is not None)
        for row in local:
            row[i] = total * (times / len(local))


def _compare(
    actual: Tensor | None, expected: Tensor | None, size: float, dtype: torch.dtype, what: str
) -> None:
    check((actual is None) == (expected is None), f"{what}: expected {expected}, got {actual}")
    if actual is None or actual.numel() == 0:
        return
    allowed = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-5}.get(dtype, 1e-4)
    error = (actual - expected).abs().max().item()
    check(
        error <= allowed * max(size, 1e-6),
        f"{what} ({dtype}): error {error:.3g} at size {size:.3g}\ngot {actual}\n"
        f"expected {expected}",
    )


def run_seeds(rank: int, world: int, seeds: list[int]) -> None:
    """Run the cases. Then each rank checks its share of them."""
    records = []
    for seed in seeds:
        case = draw_case(seed)
        try:
            record = run_case(case, rank)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{case}") from error
        if len(records) % world == rank:
            records.append((case, record))
        else:
            records.append(None)
    for entry in records:
        if entry is None:
            continue
        try:
            check_case(*entry)
        except Exception as error:
            raise AssertionError(f"seed {entry[0].seed}: {error}\n{entry[0]}") from error
