# SPDX-License-Identifier: BSD-3-Clause
"""Small training programs with named moments at which a fault may be injected.

A program prepares a model and returns a function that runs one step. It calls ``run.at(moment)``
where a fault may be injected. The harness selects the rank and the step of the fault.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

STEPS = 5
FAULT_STEP = 2


class Injected(Exception):
    """The exception that a faulty rank raises."""


class Run:
    """One rank of a case."""

    def __init__(
        self,
        rank: int,
        world: int,
        library: str,
        strike: Callable[[str], None],
    ) -> None:
        self.rank, self.world, self.library = rank, world, library
        self.step = -1
        self.wrapper: Any = None
        self._strike = strike

    def at(self, moment: str) -> None:
        if self.step in (-1, FAULT_STEP):
            self._strike(moment)

    def wrap(self, model: nn.Module, **options: Any) -> Any:
        """Wrap it with buckets of about 100 bytes."""
        if self.library != "apex":
            return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)
        from apex.parallel import DistributedDataParallel

        self.wrapper = DistributedDataParallel(model, message_size=20, **options)
        return self.wrapper


Step = Callable[[], None]


def net(run: Run) -> nn.Sequential:
    """Five layers, the middle one of which is called ``2``. Their gradients announce moments."""

    class Announcing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            run.at("forward")
            return super().forward(x)

    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)]
    model = Announcing(*layers)

    def announce(moment: str) -> Callable[[Tensor], None]:
        return lambda grad: run.at(moment)

    # The engine launches a bucket when its gradients are ready: the last layer's bucket is launched
    # before the middle layer's gradient is ready.
    model[4].weight.register_hook(announce("first gradient"))
    model[2].weight.register_hook(announce("between launches"))
    model[0].weight.register_hook(announce("last gradient"))
    return model


def batch() -> Tensor:
    return torch.randn(3, 4)


def plain(run: Run, **options: Any) -> Step:
    run.at("before construction")
    model = net(run)
    if run.step == -1:
        originals = model.named_parameters

        def named_parameters(*args: Any, **kwargs: Any) -> Any:
            run.at("in construction")
            return originals(*args, **kwargs)

        model.named_parameters = named_parameters  # type: ignore[method-assign]
    ddp = run.wrap(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        ddp(batch()).sum().backward()
        run.at("before optimizer step")
        optimizer.step()

    return step


def buffers(run: Run) -> Step:
    model = nn.Sequential(net(run), nn.BatchNorm1d(2))
    ddp = run.wrap(model, broadcast_buffers=True)

    def step() -> None:
        run.at("before broadcast")
        ddp(batch()).square().sum().backward()

    return step


def end_of_backward(run: Run) -> Step:
    ddp = run.wrap(net(run))

    def step() -> None:
        out = ddp(batch())
        # Runs when the backward ends, before or after the reducer's own end-of-backward callback.
        out.register_hook(
            lambda grad: Variable._execution_engine.queue_callback(
                lambda: run.at("end of backward")
            )
        )
        out.sum().backward()

    return step


def python_hook(run: Run) -> Step:
    ddp = run.wrap(net(run))

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
        run.at("in the hook")
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / run.world)

    ddp.register_comm_hook(None, hook)

    def step() -> None:
        ddp(batch()).sum().backward()

    return step


def builtin_hook(run: Run) -> Step:
    ddp = run.wrap(net(run))
    if run.library != "apex":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        ddp.register_builtin_comm_hook("bf16")

    def step() -> None:
        ddp(batch()).sum().backward()

    return step


def batch_norm(run: Run) -> Step:
    from apex.parallel import SyncBatchNorm

    model = nn.Sequential(nn.Linear(4, 6), SyncBatchNorm(6), nn.Linear(6, 3))
    ddp = run.wrap(model)

    def step() -> None:
        x = batch()
        run.at("before forward")
        out = ddp(x)
        run.at("before backward")
        out.square().sum().backward()

    return step


def joined(run: Run) -> Step:
    """The last rank has less data, and then shadows the others."""
    ddp = run.wrap(net(run))
    run.step = FAULT_STEP

    def step() -> None:
        less = run.rank == run.world - 1
        timer = threading.Timer(0.3, lambda: run.at("shadowing"))
        with ddp.join():
            for number in range(2 if less else 5):
                if number == 1:
                    run.at("with data")
                if number > 1:
                    time.sleep(0.15)  # so that another rank is shadowing at the moment above
                ddp.zero_grad()
                ddp(batch()).sum().backward()
            if less:
                timer.start()
        timer.join() if less else None

    return step


def amp(run: Run) -> Step:
    from apex import amp as apex_amp

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = apex_amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    ddp = run.wrap(model)

    def step() -> None:
        optimizer.zero_grad()
        loss = ddp(batch()).float().sum()
        with apex_amp.scale_loss(loss, optimizer) as scaled:
            run.at("before backward")
            scaled.backward()
            run.at("inside scale_loss")
        run.at("before optimizer step")
        optimizer.step()

    return step


# Program: the function, the moments, and a pattern for the operation that survivors' errors name.
BUCKET = r"all-reduce of bucket \d+ \(.+ \d+ elements\)|exchange of used parameters"
Moments = dict[str, str]
PROGRAMS: dict[str, tuple[Callable[[Run], Step], Moments]] = {
    "plain": (
        plain,
        {
            "before construction": "",
            "in construction": "",
            "forward": BUCKET,
            "first gradient": BUCKET,
            "between launches": BUCKET,
            "last gradient": BUCKET,
            "before optimizer step": BUCKET,
            "exit": "",
        },
    ),
    "end of backward": (end_of_backward, {"end of backward": BUCKET}),
    "buffers": (buffers, {"before broadcast": rf"broadcast of buffers \('1|{BUCKET}"}),
    "python hook": (python_hook, {"in the hook": "bucket", "between launches": "bucket"}),
    "built-in hook": (builtin_hook, {"between launches": "bucket"}),
    "batch norm": (
        batch_norm,
        {
            "before forward": r"exchange in forward of SyncBatchNorm '1'",
            "before backward": r"exchange in backward of SyncBatchNorm '1'",
        },
    ),
    "join": (joined, {"with data": "", "shadowing": ""}),
    "amp": (
        amp,
        {
            "before backward": f"{BUCKET}|overflow flags",
            "inside scale_loss": "",
            "before optimizer step": "",
        },
    ),
}
OURS_ONLY = {"batch norm", "amp"}
#: The layer whose gradient is awaited at the moment.
LAYERS = {"first gradient": 4, "between launches": 2, "last gradient": 0}


def train(run: Run, program: str, survive: bool) -> list[str]:
    """Run all steps of one rank. Returns, by step, the errors that were raised and survived."""
    prepare, _ = PROGRAMS[program]
    survived: list[str] = []
    step = prepare(run)
    steps = 1 if program == "join" else STEPS
    for number in range(steps):
        run.step = number if program != "join" else FAULT_STEP
        guard = contextlib.suppress(Injected) if survive else contextlib.nullcontext()
        with guard:
            step()
    run.step = FAULT_STEP
    run.at("exit")
    return survived
