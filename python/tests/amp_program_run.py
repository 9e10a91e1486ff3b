# SPDX-License-Identifier: BSD-3-Clause
"""Runs one random training program with amp, and compares it with references.

A program consists of a level, an optimizer, a wrapper and some iterations. In addition to amp's
levels there are models of one dtype without amp, with or without torch's GradScaler, and
apex.fp16_utils.FP16_Optimizer. A program runs
twice, with and without operations that must not change any bit: restores from a checkpoint, bodies
that raise, discarded batches, and forwards without training. Both runs must have the same bits
after every step, and agree with plain float64 training within the tolerance of the level's dtype.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from ddp_support import check, check_same_on_all_ranks, forget_amp
from torch import Tensor, nn

from apex import amp
from apex.fp16_utils import FP16_Optimizer
from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apex.parallel import DistributedDataParallel
from apex.parallel.LARC import LARC

#: By level, the largest difference from float64. The largest weights are near 1.
LEVELS = {
    "O0": 2e-6, "O1": 1e-3, "O2": 1e-3, "O3": 5e-3,
    "O1-bf16": 6e-3, "O2-bf16": 6e-3, "O3-bf16": 4e-2,
    "float32": 2e-6, "float16": 5e-3, "bfloat16": 4e-2, "FP16_Optimizer": 1e-3,
}  # fmt: skip
#: Without amp, all parameters have this dtype.
PLAIN = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: The dtype of inputs, if a level does not cast them.
INPUTS = {**PLAIN, "FP16_Optimizer": torch.float16}
LOSSES = 2
#: Ways to discard the gradients of a batch.
DISCARDS = ("optimizer", "model", "model, zeros", "None", "zero_", "data.zero_")


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.5, weight_decay=0.01)


#: The tested optimizer, and its float64 reference. With a small eps, rounding could flip a step's
#: sign.
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "SGD": (_sgd, _sgd),
    "FusedSGD": (lambda p: FusedSGD(p, lr=0.02, momentum=0.5, weight_decay=0.01), _sgd),
    "FusedSGD, damped": (
        lambda p: FusedSGD(p, lr=0.02, momentum=0.5, dampening=0.4),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.5, dampening=0.4),
    ),
    "FusedSGD, nesterov": (
        lambda p: FusedSGD(p, lr=0.02, momentum=0.5, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.5, nesterov=True),
    ),
    "Adam": (
        lambda p: torch.optim.Adam(p, lr=0.02, eps=0.1),
        lambda p: torch.optim.Adam(p, lr=0.02, eps=0.1),
    ),
    "AdamW(fused=True)": (
        lambda p: torch.optim.AdamW(p, lr=0.02, eps=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.02, eps=0.1),
    ),
    "FusedAdam": (
        lambda p: FusedAdam(p, lr=0.02, eps=0.1),
        lambda p: torch.optim.Adam(p, lr=0.02, eps=0.1),
    ),
    # For losses scaled by 1/100: the squares of the gradients are 0 in float16.
    "FusedAdam, small": (
        lambda p: FusedAdam(p, lr=0.02, eps=0.001),
        lambda p: torch.optim.Adam(p, lr=0.02, eps=0.001),
    ),
    "FusedLAMB": (lambda p: FusedLAMB(p, lr=0.02, eps=0.1, max_grad_norm=None),) * 2,
    "FusedNovoGrad": (lambda p: FusedNovoGrad(p, lr=0.01),) * 2,
    "FusedAdagrad": (lambda p: FusedAdagrad(p, lr=0.02, eps=0.1),) * 2,
    "LARC": (lambda p: LARC(_sgd(p)),) * 2,
    "LARC after initialize": (_sgd, lambda p: LARC(_sgd(p))),
}


@dataclass
class Step:
    """One iteration: several backwards, and one step of each optimizer."""

    parts: list[dict[str, Any]]  # index of the loss, delay, overflow
    write: str = ""  # halve the weights "before" the first part or after the last one ("late")
    how: str = "data"
    rescale: bool = False  # change the loss scale after the first part
    no_sync: bool = False  # for all parts but the last one
    zeros: bool = False  # zero_grad(set_to_none=False)
    times: int = 1  # the number of optimizer steps with the same gradients
    #: By name, operations that must not change any bit.
    neutral: dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    seed: int
    level: str
    optimizer: str
    optimizers: int  # one for all parameters, or two for half of them each
    wrapper: str  # "" means one process
    loss_scale: float | str | None
    steps: list[Step]

    @property
    def world(self) -> int:
        return 2 if self.wrapper else 1

    def skips(self, step: Step) -> bool:
        """Whether no optimizer may step."""
        return any(part["overflow"] for part in step.parts)


class Net(nn.Module):
    """A layer that is used twice, a norm, and an output for each loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.shared = nn.Linear(4, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, LOSSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return self.last(self.norm(self.shared(h) + h))


def batch(program: Program, step: int, part: int, rank: int) -> Tensor:
    seed = ((program.seed * 10 + step) * 10 + part) * 2 + rank
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def loss_of(program: Program, model: nn.Module, x: Tensor, part: dict[str, Any]) -> Tensor:
    output = model(x.to(INPUTS.get(program.level, x.dtype)) if x.dtype != torch.float64 else x)
    output = output if output.dtype == torch.float64 else output.float()
    errors = (output - torch.sin(x.sum(1, keepdim=True))).square().mean(0)
    factor = 0.01 if "small" in program.optimizer else 1.0
    return factor * (errors[part["loss"]] + 0.25 * errors.sum())


def make_optimizers(program: Program, net: Net, reference: bool) -> list[Any]:
    params = list(net.parameters())
    parts = [params] if program.optimizers == 1 else [params[:4], params[4:]]
    return [OPTIMIZERS[program.optimizer][reference](part) for part in parts]


def reference(program: Program) -> list[list[Tensor]]:
    """The parameters after each step, in one process, in float64, without amp."""
    net = Net(program.seed).double()
    optimizers = make_optimizers(program, net, reference=True)
    trace = []
    for number, step in enumerate(program.steps):
        halve(net.parameters(), step.how if step.write == "before" else "")
        net.zero_grad()
        for index, part in enumerate(step.parts):
            for rank in range(program.world):
                x = batch(program, number, index, rank).double()
                loss = loss_of(program, net, x, part) / len(step.parts)
                (loss / program.world).backward()
        halve(net.parameters(), step.how if step.write == "late" else "")
        if not program.skips(step):
            for optimizer in optimizers * step.times:
                optimizer.step()
        trace.append([p.detach().clone() for p in net.parameters()])
    return trace


def halve(params: Any, how: str) -> None:
    for param in params:
        if how == "data":
            param.data.mul_(0.5)
        elif how == "assign":
            param.data = param.data * 0.5
        elif how == "numpy" and param.dtype != torch.bfloat16:
            param.detach().numpy()[...] *= 0.5
        elif how:
            with torch.no_grad():
                param.mul_(0.5)


def through_a_file(states: list[Any]) -> list[Any]:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class BodyRaised(Exception):
    pass


class Run:
    """A program with amp. With `neutral`, it includes the operations that must not change any
    bit."""

    def __init__(self, program: Program, rank: int, neutral: bool) -> None:
        self.program, self.rank, self.neutral = program, rank, neutral
        net = Net(program.seed)
        self._initialize(net, make_optimizers(program, net, reference=False))

    def _initialize(self, net: Net, optimizers: list[Any]) -> None:
        self.net, self.known = amp.initialize(
            net, optimizers, opt_level=self.program.level, loss_scale=self.program.loss_scale,
            num_losses=LOSSES, max_loss_scale=2.0**8, verbosity=0,
        )  # fmt: skip
        self._wrap()

    def _wrap(self) -> None:
        kind, self.wrapped = self.program.wrapper, self.net
        self.optimizers = list(self.known)
        if self.program.optimizer == "LARC after initialize" and not isinstance(self, FP16Run):
            self.optimizers = [LARC(optimizer) for optimizer in self.known]
        if kind == "torch":
            self.wrapped = nn.parallel.DistributedDataParallel(self.net)
        elif kind:
            views = "views" in kind
            self.wrapped = DistributedDataParallel(
                self.net, message_size=100, gradient_as_bucket_view=views
            )

    def masters(self) -> list[Tensor]:
        for known in self.known:
            known._amp_lazy_init()  # before this, zero_grad would see the model's parameters
        return [master for known in self.known for master in amp.master_params(known)]

    def restore(self, order: str) -> None:
        states = [self.net.state_dict(), [o.state_dict() for o in self.known], amp.state_dict()]
        states = through_a_file(states)
        net = Net(self.program.seed + 1 + self.rank)
        optimizers = make_optimizers(self.program, net, reference=False)
        if order != "before initialize":
            self._initialize(net, optimizers)
            net, optimizers = self.net, self.known
        if order != "optimizer first":
            net.load_state_dict(states[0])
        for optimizer, state in zip(optimizers, states[1], strict=True):
            optimizer.load_state_dict(state)
        if order == "optimizer first":
            net.load_state_dict(states[0])
        if order == "before initialize":
            self._initialize(net, optimizers)
        amp.load_state_dict(states[2])

    def zero_grad(self, step: Step) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(not step.zeros)

    def discard(self, step: Step, how: str) -> None:
        if how == "optimizer":
            self.zero_grad(step)
        elif how.startswith("model"):
            self.net.zero_grad(set_to_none=how == "model")
        for param in self.net.parameters():
            if param.grad is None:
                continue
            if how == "None":
                param.grad = None
            elif how == "zero_":
                param.grad.zero_()
            elif how == "data.zero_":
                param.grad.data.zero_()

    def write(self, step: int, how: str, push: bool) -> None:
        if "O2" in self.program.level and (step > 0 or not push):
            halve(self.masters(), how)
            for known in self.known if push else ():
                known._master_params_to_model_params()
        else:
            halve(self.net.parameters(), how)

    def backward(
        self, number: int, index: int, raises: bool = False, delay: bool | None = None
    ) -> float:
        program, step = self.program, self.program.steps[number]
        part = step.parts[index]
        quiet = program.wrapper and step.no_sync and index < len(step.parts) - 1
        with self.wrapped.no_sync() if quiet else contextlib.nullcontext():
            x = batch(program, number, index, self.rank)
            loss = loss_of(program, self.wrapped, x, part) / len(step.parts)
            self._backward(loss, part, raises, part["delay"] if delay is None else delay)
        return loss.item()

    def _backward(self, loss: Tensor, part: dict[str, Any], raises: bool, delay: bool) -> None:
        options = {"loss_id": part["loss"], "delay_unscale": delay}
        try:
            with amp.scale_loss(loss, self.optimizers, **options) as scaled:
                if raises:
                    raise BodyRaised
                (scaled * self.factor(part)).backward()
        except BodyRaised:
            check(raises, "an error that nobody raised")

    def factor(self, part: dict[str, Any]) -> float:
        """An overflow is one of the last rank alone, and skips the step on all."""
        return float("inf") if part["overflow"] and self.rank == self.program.world - 1 else 1.0

    def rescale(self, loss: int) -> None:
        amp._amp_state.loss_scalers[loss]._loss_scale = 32.0

    def forward(self, x: Tensor) -> None:
        self.net(x.to(INPUTS.get(self.program.level, x.dtype)))

    def optimizers_step(self, step: Step) -> None:
        for optimizer in self.optimizers * step.times:
            optimizer.step()

    def scales(self) -> list[float]:
        return [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]

    def step(self, number: int) -> list[Any]:
        """Run one iteration. Returns the values to compare."""
        step = self.program.steps[number]
        neutral = step.neutral if self.neutral else {}
        if "restore" in neutral:
            self.restore(neutral["restore"])
        if step.write == "before":
            self.write(number, step.how, push=True)
        self.zero_grad(step)
        if "discard" in neutral and not step.parts[0]["overflow"]:
            self.backward(number, 0, delay=neutral["discard"][0])
            self.discard(step, neutral["discard"][1])
        losses = []
        for index in range(len(step.parts)):
            if neutral.get("raises") == index:
                self.backward(number, index, raises=True)
            if "evaluate" in neutral:
                with torch.no_grad():
                    self.forward(batch(self.program, number, index, 0))
            losses.append(self.backward(number, index))
            if step.rescale and index == 0:
                self.rescale(step.parts[-1]["loss"])
        if "forward" in neutral:
            self.forward(batch(self.program, number, 9, 0))
        if step.write == "late":
            self.write(number, step.how, push=False)
        self.optimizers_step(step)
        scales = self.scales()
        params, state = list(self.net.parameters()), self.net.state_dict()
        for param, master, saved in zip(params, self.masters(), state.values(), strict=True):
            check(torch.equal(param, master.to(param.dtype)), "not the master weight, rounded")
            check("O2" not in self.program.level or torch.equal(saved, master), "state_dict")
        if self.program.wrapper:
            check_same_on_all_ranks(params, f"parameters after step {number}")
            check_same_on_all_ranks([torch.tensor(scales)], f"scales after step {number}")
        tensors = params + self.masters() + list(state.values())
        return [losses, scales, *(t.detach().clone() for t in tensors)]


class PlainRun(Run):
    """A program without amp: a model of one dtype, and a GradScaler if there is a loss scale."""

    def _initialize(self, net: Net, optimizers: list[Any]) -> None:
        self.net, self.known = net.to(PLAIN[self.program.level]), optimizers
        scale = self.program.loss_scale
        fixed = isinstance(scale, float)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=float(scale) if fixed else 2.0**8, enabled=scale is not None,
            growth_interval=2**30,
        )  # fmt: skip
        self._wrap()

    def masters(self) -> list[Tensor]:
        return list(self.net.parameters())

    def restore(self, order: str) -> None:
        states = [self.net.state_dict(), [o.state_dict() for o in self.known]]
        states = through_a_file([*states, self.scaler.state_dict()])
        net = Net(self.program.seed + 1 + self.rank)
        self._initialize(net, make_optimizers(self.program, net, reference=False))
        self.net.load_state_dict(states[0])
        for optimizer, state in zip(self.known, states[1], strict=True):
            optimizer.load_state_dict(state)
        self.scaler.load_state_dict(states[2])

    def _backward(self, loss: Tensor, part: dict[str, Any], raises: bool, delay: bool) -> None:
        (self.scaler.scale(loss) * self.factor(part)).backward()

    def optimizers_step(self, step: Step) -> None:
        if not self.scaler.is_enabled():
            super().optimizers_step(step)
            return
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def scales(self) -> list[float]:
        return [self.scaler.get_scale()]


class FP16Run(Run):
    """A program with a float16 model and one FP16_Optimizer."""

    def _initialize(self, net: Net, optimizers: list[Any]) -> None:
        (inner,) = optimizers
        scale = self.program.loss_scale
        options: dict[str, Any] = {"static_loss_scale": scale or 1.0}
        if scale == "dynamic":
            options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**8}}
        if self.program.optimizer == "LARC after initialize":
            inner = LARC(inner)
        self.net = net.half()
        self.known = [FP16_Optimizer(inner, **options, verbose=False)]
        self._wrap()

    def masters(self) -> list[Tensor]:
        return [master for group in self.known[0].param_groups for master in group["params"]]

    def restore(self, order: str) -> None:
        states = through_a_file([self.net.state_dict(), self.known[0].state_dict()])
        net = Net(self.program.seed + 1 + self.rank)
        self._initialize(net, make_optimizers(self.program, net, reference=False))
        parts = [self.net, self.known[0]]
        for index in (1, 0) if order == "optimizer first" else (0, 1):
            parts[index].load_state_dict(states[index])

    def write(self, step: int, how: str, push: bool) -> None:
        halve(self.masters(), how)
        for param, master in zip(self.net.parameters(), self.masters(), strict=True):
            param.data.copy_(master.data)

    def rescale(self, loss: int) -> None:
        self.known[0].loss_scale = 32.0

    def _backward(self, loss: Tensor, part: dict[str, Any], raises: bool, delay: bool) -> None:
        self.known[0].backward(loss * self.factor(part), update_master_grads=not delay)

    def scales(self) -> list[float]:
        return [self.known[0].loss_scale]


def run_program(program: Program, rank: int) -> None:
    wanted, traces = reference(program), []
    kind = FP16Run if program.level == "FP16_Optimizer" else Run
    for neutral in (False, True):
        run = (PlainRun if program.level in PLAIN else kind)(program, rank, neutral)
        traces.append([run.step(number) for number in range(len(program.steps))])
        forget_amp()
    for number, (plain, full) in enumerate(zip(*traces, strict=True)):
        check(plain[:2] == full[:2], f"step {number}: losses, scales {plain[:2]}, {full[:2]}")
        for index, (a, b) in enumerate(zip(plain[2:], full[2:], strict=True)):
            check(torch.equal(a, b), f"step {number}: tensor {index} differs by neutral operations")
        for index, want in enumerate(wanted[number]):
            error = (plain[2 + len(wanted[0]) + index].double() - want).abs().max()
            limit = LEVELS[program.level]
            check(error <= limit, f"step {number}, parameter {index}: {error:.2g} from float64")


def run_programs(rank: int, world: int, programs: list[Program]) -> None:
    for program in programs:
        try:
            run_program(program, rank)
        except Exception as error:
            raise AssertionError(f"amp program of seed {program.seed}: {error!r}") from error
        finally:
            forget_amp()
