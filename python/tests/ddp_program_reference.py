# SPDX-License-Identifier: BSD-3-Clause
"""The gradients that a random program must leave on every rank, computed in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ddp_program_nets import NARROW, WIDTH, Outputs, in_lockstep, plain_parameters, reference_of
from ddp_support import check_near, dense, wide, widen
from torch import Tensor, nn

TINY = 1e-38  # float32's smallest normal number is 1.2e-38
# Relative to the largest contribution. Two sums of these dtypes may round differently.
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class Forward:
    model: int
    wrapper: Any
    skip: list[list[int]]  # [rank]


def data(uid: int, rank: int, micro: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(((uid * 8 + rank) * 8 + micro) * 8 + index)
    x = torch.randn(WIDTH, WIDTH, generator=generator).requires_grad_()
    return x, torch.randint(5, (WIDTH,), generator=generator)


def losses(
    outputs: Sequence[Outputs], inputs: Sequence[Tensor], args: dict[str, Any], how: str
) -> list[Tensor]:
    """The losses of the backwards, in order."""
    if args.get("chain"):
        outputs, inputs = outputs[-1:], inputs[:1]
    first = [output.last.square().mean() for output in outputs]
    second = [torch.sin(output.middle).mean() for output in outputs]
    each = [a + b for a, b in zip(first, second, strict=True)]
    todo = [sum(each)]
    if how == "each":
        todo = each
    elif how == "reversed":
        todo = each[::-1]
    elif how == "twice":
        todo = [sum(first), sum(second)]
    elif how == "first":
        todo = [sum(first)]
    elif how == "penalty":  # of the first forward's slope
        slope = torch.autograd.grad(outputs[0].last.sum(), inputs[0], create_graph=True)[0]
        todo = [sum(each) + slope.square().mean()]
    return [loss * TINY for loss in todo] if args.get("tiny") else todo


class Reference:
    """Every rank's expected gradients, in float64, of all models of a program.

    ``average`` is ``mean``, ``sum`` or ``weighted``, as in all wrappers of the program.
    """

    def __init__(self, world: int, average: str) -> None:
        self.world, self.average = world, average
        self.local: dict[nn.Parameter, list[Tensor | None]] = {}
        # The largest contribution in this step.
        self.size: dict[nn.Parameter, float] = {}
        self.frozen: set[int] = set()
        # Contributed to by a rank since the last synchronized backward.
        self.fired: set[int] = set()
        # By model, what its ranks have accumulated since then.
        self.weights: dict[int, list[float]] = {}

    def clear(self, how: str) -> None:
        """As zero_grad() of all models, on all ranks."""
        if how == "skip":
            return
        if how == "none":
            self.weights.clear()
        for row in self.local.values():
            row[:] = [None if g is None or how == "none" else torch.zeros_like(g) for g in row]

    def give_up(self, model: int, parameters: Sequence[nn.Parameter], ranks: list[int]) -> None:
        """Some ranks clear the gradients of a model in the middle of an accumulation."""
        for rank in ranks:
            for parameter in parameters:
                if parameter in self.local:
                    self.local[parameter][rank] = None
            if model in self.weights:
                self.weights[model][rank] = 0.0

    def forget(self) -> None:
        """After a step that failed or was skipped on all ranks."""
        self.clear("none")
        self.fired.clear()

    def backward(
        self,
        models: nn.ModuleList,
        forwards: list[Forward],
        uid: int,
        micro: int,
        args: dict[str, Any],
        how: str,
        weights: list[float],
        synchronized: set[int],
        trains: list[bool],
        chosen: set[int] | None,
    ) -> None:
        """Add one micro-batch of the ranks that ``trains``, with their ``weights``, and average the
        gradients of the models in ``synchronized``. ``chosen`` limits it to some parameters."""
        parameters = plain_parameters(models)
        narrow = any(p.dtype in NARROW for p in parameters)
        ranks = range(self.world)
        references = [reference_of(models, rank, narrow) for rank in ranks]
        own = [plain_parameters(reference) for reference in references]
        for row in own:
            for parameter, actual in zip(row, parameters, strict=True):
                parameter.requires_grad_(id(actual) not in self.frozen)
        outputs: list[list[Outputs]] = []
        inputs: list[list[Tensor]] = []
        for index, forward in enumerate(forwards):
            batches = [data(uid, rank, micro, index) for rank in ranks]
            inputs.append([x if narrow else widen(x) for x, _ in batches])
            if args.get("chain") and outputs:
                inputs[-1] = [output.last for output in outputs[-1]]
            nets = [reference[forward.model] for reference in references]
            ids = [ids for _, ids in batches]
            outputs.append(in_lockstep(nets, inputs[-1], ids, forward.skip))
        todo = [
            losses([out[r] for out in outputs], [x[r] for x in inputs], args, how) for r in ranks
        ]
        for m in {forward.model for forward in forwards}:
            if any(id(p) not in self.frozen for p in plain_parameters(models[m])):
                row = self.weights.setdefault(m, [0.0] * self.world)
                row[:] = [a + b * t for a, b, t in zip(row, weights, trains, strict=True)]
        models_of: dict[int, int] = {}  # of a shared parameter, one that communicates
        for m in sorted(range(len(models)), key=lambda m: m in synchronized):
            models_of.update((id(p), m) for p in plain_parameters(models[m]))
        for i in range(len(todo[0])):
            for row in own:
                for parameter in row:
                    parameter.grad = None
            total = [
                row[i] * w for row, w, there in zip(todo, weights, trains, strict=True) if there
            ]
            if total:
                sum(total).backward(retain_graph=True)
            last = i + 1 == len(todo[0])
            for index, parameter in enumerate(parameters):
                grads = [row[index].grad for row in own]
                if chosen is None or id(parameter) in chosen:
                    self._add(parameter, grads)
                m = models_of[id(parameter)]
                if m in synchronized and (last or self.average == "mean"):
                    self._average(parameter, m)
        for m in synchronized:
            self.weights.pop(m, None)

    def _add(self, parameter: nn.Parameter, grads: list[Tensor | None]) -> None:
        row = self.local.setdefault(parameter, [None] * self.world)
        for rank, grad in enumerate(grads):
            if grad is None:
                continue
            self.fired.add(id(parameter))
            grad = dense(grad)
            grad = grad.to(wide(grad.dtype))
            row[rank] = grad.clone() if row[rank] is None else row[rank] + grad
        values = [g for g in [*row, *map(dense, grads)] if g is not None and g.numel()]
        sizes = [g.abs().max().item() for g in values]
        self.size[parameter] = max([self.size.get(parameter, 0.0), *sizes])

    def _average(self, parameter: nn.Parameter, model: int) -> None:
        """Average, if any rank has contributed since the last synchronized backward."""
        row = self.local.get(parameter, [None])
        if id(parameter) not in self.fired:
            return
        self.fired.discard(id(parameter))
        if all(grad is None for grad in row):
            return
        by = {"mean": float(self.world), "sum": 1.0}.get(self.average)
        if by is None:
            by = sum(self.weights.get(model, [])) or float("inf")  # gradients of no sample are 0
        total = sum(grad for grad in row if grad is not None)
        row[:] = [total / by] * self.world

    def compare(
        self, rank: int, net: Any, what: str, tolerance: float, checkpoint: bool = False
    ) -> None:
        """Check this rank's gradients of one model."""
        if checkpoint:  # which adds gradients of 16-bit activations, of any model, in another order
            tolerance = max(tolerance, *(TOLERANCE.get(p.dtype, 0.0) for p in self.local))
        for name, parameter in net.named_parameters():
            row = self.local.get(parameter)
            expected = None if row is None else row[rank]
            if expected is not None and not expected.to(parameter.dtype).isfinite().all():
                continue  # a model whose values overflow its dtype
            allowed = max(tolerance, TOLERANCE.get(parameter.dtype, 0.0))
            # Of a bias before batch norm the gradient is zero but for rounding.
            size = max(self.size.get(parameter, 0.0), 1.0 if net.has("syncbn") else 1e-2)
            check_near(
                dense(parameter.grad), expected, f"{what}: gradient of {name}", allowed, size
            )

    def continue_from(self, parameters: Sequence[nn.Parameter]) -> None:
        """Use the actual gradients, equal on all ranks, so that errors do not accumulate over
        steps."""
        for parameter in parameters:
            grad = dense(parameter.grad)
            value = None if grad is None else grad.to(wide(grad.dtype)).clone()
            self.local[parameter] = [value] * self.world
