# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer compared with the plain optimizer."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import (
    DEVICE,
    RankPool,
    check,
    check_equal,
    check_same_on_all_ranks,
    forget_amp,
    host_channel,
    on_ranks,
    raises,
)
from sharded_cases import run_seeds
from torch import Tensor, nn

from apex import amp
from apex.optimizers import FusedAdam, ShardedOptimizer
from apex.parallel import DistributedDataParallel, Reducer
from apex.parallel.LARC import LARC

pytestmark = pytest.mark.processes

SEEDS = 16


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_ranks(timeout_s=240)
def test_sharded_optimizer_random_programs_step_as_the_plain_one_does(
    rank: int, world: int
) -> None:
    first = int(os.environ.get("APEX_TEST_SEED", "0"))
    run_seeds(rank, world, list(range(first + world - 1, first + SEEDS, 4)))


def _model(width: int = 300) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))


def _sharded(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(model.parameters(), kind, **{"lr": 0.1, **options})


def _backward(model: nn.Module, step: int = 0) -> None:
    model.zero_grad()
    x = torch.sin(torch.arange(40.0).view(5, 8) * (step + 1))
    model(x).square().mean().backward()


@on_ranks(2)
def test_sharded_optimizer_says_what_is_wrong_with_its_arguments(rank: int, world: int) -> None:
    model = _model(5)
    for options, kind, error, text in (
        ({"overlap_with_ddp": True}, torch.optim.SGD, ValueError, "overlap_with_ddp"),
        ({}, torch.optim.LBFGS, ValueError, "LBFGS cannot be sharded"),
        ({}, "adam", TypeError, "the class of an optimizer"),
        ({}, lambda params, lr: 3, TypeError, "made a int, no optimizer"),
        ({"betas": 3}, torch.optim.SGD, TypeError, "betas"),
    ):
        with raises(error, text):
            _sharded(model, kind, **options)
    with raises(RuntimeError, "rank 1's model differs from rank 0's", "0.0"):
        _sharded(_model(5 + rank))
    named = [("first" if rank == 0 else "other", nn.Parameter(torch.ones(3)))]
    with raises(RuntimeError, "first", "other"):
        ShardedOptimizer(named, torch.optim.SGD, lr=0.1)
    with raises(RuntimeError, "optimizer_class=SGD", "optimizer_class=AdamW"):
        _sharded(model, torch.optim.SGD if rank == 0 else torch.optim.AdamW)
    with raises(RuntimeError, "constructed with lr=0.1, rank 1 with lr=0.2"):
        _sharded(model, lr=0.1 + 0.1 * rank)
    both = nn.Parameter(torch.ones(4, 4))
    with raises(ValueError, f"rank {rank}: parameter '0.1' shares memory with another one"):
        ShardedOptimizer([both, nn.Parameter(both.detach()[:2])], torch.optim.SGD, lr=0.1)
    metas = [nn.Parameter(torch.ones(3, device="meta"), requires_grad=i == 2) for i in range(3)]
    with raises(ValueError, "parameter '0.2' has no memory of its own"):
        ShardedOptimizer(metas, torch.optim.SGD, lr=0.1)
    ShardedOptimizer([*metas[:2], both], torch.optim.SGD, lr=0.1)  # frozen
    optimizer = _sharded(model)
    with raises(RuntimeError, "differs from rank 0's"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(rank + 1))]})
    check_equal(len(optimizer.param_groups), 1, "groups")
    with raises(RuntimeError, "call consolidate_state_dict"):
        optimizer.state_dict()
    for to in ("x", 2):
        with raises(ValueError, f"to={to!r}: there are ranks 0 to 1"):
            optimizer.consolidate_state_dict(to=to)  # type: ignore[arg-type]
    with raises(TypeError, "cannot be copied or pickled"):
        copy.deepcopy(optimizer)


@on_ranks(2)
def test_sharded_optimizer_state_is_on_the_rank_that_steps_or_collects_it(
    rank: int, world: int
) -> None:
    model = _model()
    optimizer = _sharded(model, torch.optim.Adagrad)  # whose constructor creates state
    check(len(optimizer.state) < 4, "state of all parameters")
    _backward(model)
    optimizer.step()
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        check_equal(sorted(optimizer.state_dict()["state"]), [0, 1, 2, 3], "parameters")
    else:
        with raises(RuntimeError, "rank 0 has the state of its own share only"):
            optimizer.state_dict()
    optimizer.consolidate_state_dict(to=None)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    held = [t for one in optimizer.state.values() for t in one.values() if t.ndim > 0]
    check_equal({t.numel() for t in held}, {2400} if rank == 0 else {300, 900, 3}, "whose state")
    _backward(model)
    check_equal(optimizer.step(lambda: 5.0), 5.0, "the closure's loss")
    with raises(RuntimeError, "after the last step"):
        optimizer.state_dict()
    state["param_groups"].append(state["param_groups"][0])
    with raises(ValueError, "different number of parameter groups"):
        optimizer.load_state_dict(state)


# --- parts of other libraries, and of this one ---


def _compare(
    make: Callable[[], Any],
    optimizer_of: Callable[[Any, bool], Any],
    step: Callable[[Any, Any, int], None] | None = None,
) -> None:
    """Three steps with the sharded and with the plain optimizer give the same parameters."""
    results: list[list[Tensor]] = []
    for sharded in (True, False):
        torch.manual_seed(1)
        held = make()
        optimizer = optimizer_of(held, sharded)
        for number in range(3):
            if step is not None:
                step(held, optimizer, number)
            else:
                for i, p in enumerate(held):
                    p.grad = torch.full_like(p, (0.3 + number) * (1 - i % 2 * 2))
            optimizer.step()
        results.append([p.detach() for p in held])
    for mine, theirs in zip(*results, strict=True):
        check_equal(mine, theirs, "parameters")
    check_same_on_all_ranks(results[0], "parameters")


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_sharded_optimizer_any_optimizer_and_parameter_steps_as_the_plain_one(
    rank: int, world: int
) -> None:
    def sharded(kind: Any, held: Any, on: bool, **options: Any) -> Any:
        return ShardedOptimizer(held, kind, **options) if on else kind(held, **options)

    def real() -> list[Tensor]:
        held = [torch.randn(50) for _ in range(3)]
        held += [torch.randn(6, 8)[:, ::2], torch.randn(4, 9).t(), torch.randn(0)]
        return [nn.Parameter(p) for p in held]

    def mixed() -> list[Tensor]:
        return [*real(), nn.Parameter(torch.randn(50, dtype=torch.complex64))]

    _compare(real, lambda held, on: sharded(FusedAdam, held, on))
    _compare(mixed, lambda held, on: sharded(torch.optim.SGD, held, on, lr=0.1, momentum=0.9))
    # LARC inside, and outside
    larc = lambda held, lr: LARC(torch.optim.SGD(held, lr=lr))  # noqa: E731
    flat = lambda: [nn.Parameter(torch.randn(n, 3)) for n in (9, 2, 5)]  # noqa: E731
    _compare(flat, lambda held, on: sharded(larc, held, on, lr=0.1))
    _compare(flat, lambda held, on: LARC(sharded(torch.optim.SGD, held, on, lr=0.1)))

    def embedding(held: Any, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        rows = torch.tensor([number, 5])
        nn.functional.embedding(rows, held[0], sparse=True).sum().backward()
        (held[1].square().sum() + held[2].sum() * 2).backward()

    _compare(flat, lambda held, on: sharded(torch.optim.SGD, held, on, lr=0.1), embedding)
    _compare(
        lambda: flat()[:1],
        lambda held, on: sharded(torch.optim.SparseAdam, held, on),
        lambda held, optimizer, number: embedding([*held, *flat()[1:]], optimizer, number),
    )


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@on_ranks(2)
def test_sharded_optimizer_with_amp_steps_as_the_plain_one(
    rank: int, world: int, level: str
) -> None:
    """Also saves and loads, and adds a group."""
    results = []
    for sharded in (True, False):

        def made(on: bool = sharded) -> tuple[Any, Any]:
            model = _model()
            options: dict[str, Any] = {"lr": 0.1, "eps": 1e-3}  # torch's is zero in float16
            optimizer: Any = (
                _sharded(model, **options)
                if on
                else torch.optim.AdamW(model.parameters(), **options)
            )
            return amp.initialize(  # type: ignore[return-value]
                model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
            )

        def step(model: Any, optimizer: Any, number: int) -> None:
            optimizer.zero_grad()
            x = torch.sin(torch.arange(40.0).view(5, 8) * (number + 1))
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()

        model, optimizer = made()
        for number in range(3):
            step(model, optimizer, number)
        if sharded:
            optimizer.consolidate_state_dict(to=None)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        forget_amp()
        model, optimizer = made()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        step(model, optimizer, 3)
        extra = nn.Parameter(torch.full((7, 7), 0.3, dtype=next(model.parameters()).dtype))
        optimizer.add_param_group({"params": [extra]})
        step(model, optimizer, 4)
        results.append([p.detach().clone() for p in amp.master_params(optimizer)])
        results[-1] += [p.detach().clone() for p in model.parameters()]
        forget_amp()
    for mine, theirs in zip(*results, strict=True):
        check_equal(mine, theirs, level)
    check_same_on_all_ranks(results[0], level)


#: Matrices of a transformer of width 96 with six layers, embeddings and a head.
MATRICES = [(384, 96), (288, 96), (96, 96), (384, 96), (96, 384)] * 6 + [(512, 96)] * 2


@pytest.mark.parametrize("world", [2, 4])
@on_ranks()
def test_sharded_optimizer_balances_the_ranks(rank: int, world: int) -> None:
    held = [nn.Parameter(torch.randn(shape)) for shape in MATRICES]
    held[0].requires_grad_(False)
    optimizer = ShardedOptimizer(held, torch.optim.Muon, lr=0.02)
    loads = [0] * world
    for p, owner in zip(held[1:], optimizer._owners[1:], strict=True):
        loads[owner] += p.numel()
    check(max(loads) < 1.05 * sum(loads) / world, f"loads of the ranks: {loads}")


@on_ranks(2)
def test_sharded_optimizer_under_join_is_refused(rank: int, world: int) -> None:
    wrapped = DistributedDataParallel(_model(5))
    optimizer = _sharded(wrapped)
    with raises(RuntimeError, "ShardedOptimizer needs every rank"), wrapped.join():
        _backward(wrapped)
        optimizer.step()


@on_ranks(3)
def test_sharded_optimizer_steps_while_another_thread_reduces_and_a_rank_is_paused(
    rank: int, world: int
) -> None:
    """Hazard: the threads of a rank issue in another order than those of the paused one, which is
    no difference, because each has its own group."""
    model = _model()
    optimizer = _sharded(model)
    values = torch.empty(1000)
    reducer = Reducer([values], process_group=dist.new_group())
    failures: list[BaseException] = []

    def reduce() -> None:
        try:
            for step in range(60):
                values.fill_(rank + step)
                reducer.reduce()
                check(bool((values == step + (world - 1) / 2).all()), f"average {step}")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=reduce)
    thread.start()
    for step in range(60):
        if rank == 1 and step == 20:
            pauses = subprocess.Popen(
                ["/bin/sh", "-c", "kill -STOP $PPID; sleep 2; kill -CONT $PPID"]
            )
        _backward(model, step)
        optimizer.step()
    thread.join()
    if rank == 1:
        pauses.wait()
    check(not failures, f"{failures}")
    check_same_on_all_ranks(list(model.parameters()), "parameters")


# --- failures ---


class Fails(torch.optim.SGD):
    error: type[BaseException] = ArithmeticError

    def step(self, closure: Any = None) -> None:
        super().step()
        if dist.get_rank() == 1:
            raise self.error("no more numbers")


@on_ranks(3, lost=(1,))
def test_sharded_optimizer_names_a_rank_that_is_killed_in_its_step(rank: int, world: int) -> None:
    model = _model()
    optimizer = _sharded(model, Killed)
    _backward(model)
    with raises(RuntimeError, "rank 1"):
        optimizer.step()


class Killed(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Interrupted(Fails):
    error = KeyboardInterrupt


@on_ranks(3)
def test_sharded_optimizer_counts_as_one_step_also_on_ranks_without_a_share(
    rank: int, world: int
) -> None:
    ddp = DistributedDataParallel(nn.Linear(8, 1, bias=False))
    optimizer = _sharded(ddp)
    for step in range(3):
        _backward(ddp, step)
        optimizer.step()
    with torch.no_grad():
        ddp.module.weight.add_(rank == 2)
    _backward(ddp, 3)  # the others have not made fewer steps


def _nothing(rank: int, world: int) -> None:
    pass


def _raises(rank: int, world: int, how: str, channel: str) -> None:
    def closure() -> None:
        if rank == 1:
            raise ArithmeticError("no more numbers")

    with host_channel(channel):
        model = _model()
        kinds = {"step": Fails, "interrupt": Interrupted, "closure": torch.optim.SGD}
        failing, other = _sharded(model, kinds[how]), _sharded(model)
        wrapper = DistributedDataParallel(nn.Linear(8, 3))
        _backward(model)
        begin = time.monotonic()
        error = KeyboardInterrupt if how == "interrupt" else ArithmeticError
        with raises(error if rank == 1 else RuntimeError, "no more numbers"):
            # over NCCL, a step is only enqueued, and a later one finds the failure
            while time.monotonic() - begin < 20:
                failing.step(closure if how == "closure" else None)
                check(DEVICE != "cpu", "no error")
                time.sleep(0.2)
        check_equal([len(group["params"]) for group in failing.param_groups], [4], "parameters")
        for call in (
            other.step,
            lambda: failing.consolidate_state_dict(to=None),
            lambda: _sharded(nn.Linear(3, 3)),
            lambda: _backward(wrapper),
        ):
            with raises(RuntimeError, "earlier collective of this process group has failed"):
                call()


@pytest.mark.parametrize(
    ("how", "channel"), [("step", "1"), ("closure", "1"), ("interrupt", "1"), ("step", "0")]
)
def test_sharded_optimizer_step_that_raises_on_one_rank_fails_the_group(
    ranks: RankPool, how: str, channel: str
) -> None:
    ranks.run(3, _raises, how, channel)
    # Another number of ranks makes the pool create a new group. All ranks take part, because the
    # end of the old one waits for peers that have not left it.
    ranks.run(4, _nothing)
