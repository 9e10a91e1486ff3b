# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer compared with the plain optimizer.

More cases: ``python python/tests/test_sharded_optimizer.py --cases 1000``.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import sys
import time
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
    raises,
)
from sharded_cases import run_seeds
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam, ShardedOptimizer
from apex.parallel import DistributedDataParallel, OverlappedOptimizer

pytestmark = pytest.mark.processes

CASES = 16


def _run(pool: RankPool, first: int, count: int, says: bool = False) -> None:
    for world in (1, 2, 3, 4):
        seeds = [seed for seed in range(first, first + count) if seed % 4 == world - 1]
        for begin in range(0, len(seeds), 25):
            pool.run(world, run_seeds, seeds[begin : begin + 25], timeout_s=240)
            if says:
                print(f"{world} ranks: {begin + 25} of {len(seeds)} cases agree", flush=True)


def test_sharded_optimizer_random_programs_step_as_the_plain_one_does(ranks: RankPool) -> None:
    _run(ranks, 0, CASES)


def _model(width: int = 4096) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))


def _sharded(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(model.parameters(), kind, **{"lr": 0.1, **options})


def _backward(model: nn.Module, step: int = 0) -> None:
    model.zero_grad()
    x = torch.sin(torch.arange(40.0).view(5, 8) * (step + 1))
    model(x).square().mean().backward()


def _arguments(rank: int, world: int) -> None:
    model = _model(5)
    for options, kind, error, text in (
        ({"overlap_with_ddp": True}, torch.optim.SGD, ValueError, "overlap_with_ddp"),
        ({}, torch.optim.LBFGS, ValueError, "LBFGS cannot be sharded"),
        ({}, torch.optim.SparseAdam, ValueError, "SparseAdam cannot be sharded"),
        ({}, "adam", TypeError, "the class of an optimizer"),
        ({}, lambda params, lr: 3, TypeError, "made a int, not an optimizer"),
        ({"ddp": model}, torch.optim.SGD, TypeError, "ddp must be a DistributedDataParallel"),
        ({"cost": lambda p: -1.0}, torch.optim.SGD, ValueError, "finite and not negative"),
        ({"betas": 3}, torch.optim.SGD, TypeError, "betas"),
        ({"whole_parameters": rank == 0}, torch.optim.SGD, RuntimeError, "whole_parameters="),
        ({"cost": lambda p: p.numel() ** rank}, torch.optim.SGD, RuntimeError, "cost="),
    ):
        with raises(error, text):
            _sharded(model, kind, **options)
    with raises(RuntimeError, "rank 1's model differs from rank 0's"):
        _sharded(_model(5 + rank))
    with raises(RuntimeError, "constructed with lr=0.1, rank 1 with lr=0.2"):
        _sharded(model, lr=0.1 + 0.1 * rank)
    # Rank 0 steps the matrix, rank 1 the vector.
    mixed = [nn.Parameter(torch.ones(9, 9)), nn.Parameter(torch.ones(9))]
    error, text = (ValueError, "2D") if rank == 1 else (RuntimeError, "refused: ValueError")
    with raises(error, text):
        ShardedOptimizer(mixed, torch.optim.Muon, lr=0.1)
    with raises(TypeError, "whole_parameters must be True, False or None"):
        _sharded(model, whole_parameters="no")
    with raises(ValueError, "shares memory with another one"):
        ShardedOptimizer([mixed[0], mixed[0].detach()[1]], torch.optim.SGD, lr=0.1)
    with raises(ValueError, "gaps in its memory"):
        ShardedOptimizer([torch.ones(4, 4)[:, :2]], torch.optim.SGD, lr=0.1)
    optimizer = _sharded(model)
    with raises(RuntimeError, "call consolidate_state_dict"):
        optimizer.state_dict()
    with raises(ValueError, "to='x': there are ranks 0 to 1"):
        optimizer.consolidate_state_dict(to="x")  # type: ignore[arg-type]
    with raises(ValueError, "there are ranks 0 to 1"):
        optimizer.consolidate_state_dict(to=2)
    with raises(TypeError, "cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with raises(ValueError, "cannot be sharded"):
        _sharded(model, OverlappedOptimizer)
    wrapped = DistributedDataParallel(_model(5))
    with raises(ValueError, "ShardedOptimizer cannot step its parameters one module at a time"):
        OverlappedOptimizer(_sharded(wrapped), wrapped)


def test_sharded_optimizer_says_what_is_wrong_with_its_arguments(ranks: RankPool) -> None:
    ranks.run(2, _arguments)


def _checkpoints(rank: int, world: int) -> None:
    model = _model()
    optimizer = _sharded(model)
    _backward(model)
    optimizer.step()
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        state = optimizer.state_dict()
        check_equal(sorted(state["state"]), [0, 1, 2, 3], "parameters")
    else:
        with raises(RuntimeError, "rank 0 has the state of its own share only"):
            optimizer.state_dict()
    optimizer.consolidate_state_dict(to=None)
    state = copy.deepcopy(optimizer.state_dict())
    other = torch.optim.AdamW(_model(7).parameters(), lr=0.1)
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    other.step()
    with raises(ValueError, "whose shape is"):
        _sharded(model).load_state_dict(other.state_dict())
    state["param_groups"].append(state["param_groups"][0])
    with raises(ValueError, "of [4, 4] parameters, this optimizer of [4]"):
        optimizer.load_state_dict(state)
    _backward(model)
    optimizer.step()
    with raises(RuntimeError, "after the last step"):
        optimizer.state_dict()
    # Half of the elements, and half of the state.
    held = [t for one in optimizer.state.values() for t in one.values() if t.ndim > 0]
    elements = sum(p.numel() for p in model.parameters())
    check(sum(t.numel() for t in held) < 2 * elements / world * 1.02, "state of more than a share")


def test_sharded_optimizer_state_is_on_the_rank_that_collects_it(ranks: RankPool) -> None:
    ranks.run(2, _checkpoints)


def _sparse(rank: int, world: int) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = _sharded(table, torch.optim.SGD)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 2])).sum().backward()
    with raises(ValueError, "gradient of parameter '0.0' is sparse"):
        optimizer.step()
    check_equal(table.weight.detach(), before, "weights")


def test_sharded_optimizer_refuses_sparse_gradients(ranks: RankPool) -> None:
    ranks.run(1, _sparse)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_sharded_optimizer_with_amp_steps_as_the_plain_one(ranks: RankPool, level: str) -> None:
    ranks.run(2, _amp, level)


def _amp(rank: int, world: int, level: str) -> None:
    results = []
    for sharded in (True, False):
        model = _model()
        kind, eps = torch.optim.AdamW, 1e-3  # torch's default is zero in float16
        optimizer: Any = (
            _sharded(model, eps=eps) if sharded else kind(model.parameters(), lr=0.1, eps=eps)
        )
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
        )
        for step in range(3):
            optimizer.zero_grad()
            x = torch.sin(torch.arange(40.0).view(5, 8) * (step + 1))
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
        results.append([p.detach().clone() for p in amp.master_params(optimizer)])
        results[-1] += [p.detach().clone() for p in model.parameters()]
    for mine, theirs in zip(*results, strict=True):
        check_equal(mine, theirs, level)
    check_same_on_all_ranks(results[0], level)


class Counts(torch.optim.SGD):
    """Counts its steps in each group of which it steps something."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            if group["params"]:
                group["count"] = group.get("count", 0) + 1


def _counted(rank: int, world: int) -> None:
    model = _model()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = ShardedOptimizer(groups, Counts, lr=0.1)
    for step in range(3):
        _backward(model, step)
        optimizer.step()
    optimizer.consolidate_state_dict(to=None)
    found = [group["count"] for group in optimizer.state_dict()["param_groups"]]
    check_equal(found, [3] * 4, "steps of each group, whoever has it")
    later = ShardedOptimizer(groups, Counts, whole_parameters=True, lr=0.1)
    later.load_state_dict(optimizer.state_dict())
    check_equal([group["count"] for group in later.param_groups], [3] * 4, "loaded")


def test_sharded_optimizer_saves_what_other_ranks_have_counted(ranks: RankPool) -> None:
    ranks.run(3, _counted)


def _mixed(rank: int, world: int) -> None:
    """The kernels of FusedAdam depend on all parameters, not on a rank's own."""
    nets = []
    for sharded in (True, False):
        torch.manual_seed(1)
        held = [nn.Parameter(torch.randn(5000)) for _ in range(3)]
        held.append(nn.Parameter(torch.randn(5000, dtype=torch.complex64)))
        optimizer: Any = ShardedOptimizer(held, FusedAdam) if sharded else FusedAdam(held)
        for step in range(3):
            for p in held:
                p.grad = torch.full_like(p, 0.3 + step)
            optimizer.step()
        nets.append([p.detach() for p in held])
    for mine, theirs in zip(*nets, strict=True):
        check_equal(mine, theirs, "parameters")


def test_sharded_optimizer_takes_the_kernels_of_the_plain_one(ranks: RankPool) -> None:
    ranks.run(2, _mixed)


#: Matrices of a transformer of width 96 with six layers, embeddings and a head.
MATRICES = [(384, 96), (288, 96), (96, 96), (384, 96), (96, 384)] * 6 + [(512, 96)] * 2


def _muon(rank: int, world: int) -> None:
    torch.manual_seed(rank)  # the constructor broadcasts rank 0's values
    mine = [nn.Parameter(torch.randn(shape)) for shape in MATRICES]
    mine[0].requires_grad_(False)
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    sharded = ShardedOptimizer(mine, torch.optim.Muon, **options)
    theirs = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in mine]
    plain = torch.optim.Muon(theirs, **options)
    for step in range(4):
        torch.manual_seed(step)
        for p, q in zip(mine, theirs, strict=True):
            if p.requires_grad:
                q.grad = torch.randn(p.shape)
                p.grad = q.grad.clone()
        sharded.step()
        plain.step()
        for i, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            check_equal(p.detach(), q.detach(), f"step {step}, matrix {i}")
    costs = [0.0 if i == 0 else m * n * min(m, n) for i, (m, n) in enumerate(MATRICES)]
    loads = [sum(costs[i] for i, _, _ in of) for of in sharded._shares.core.shards()]
    check(max(loads) < 1.05 * sum(loads) / world, f"loads of the ranks: {loads}")


def test_sharded_optimizer_muon_is_the_plain_one_and_balanced(ranks: RankPool) -> None:
    for world in (2, 3, 4):
        ranks.run(world, _muon)


def _formats(rank: int, world: int, how: str) -> None:
    net = nn.Conv2d(32, 64, 3) if how == "channels_last" else nn.Linear(80, 80)
    optimizer = _sharded(net)
    net(torch.ones(1, 32, 4, 4) if how == "channels_last" else torch.ones(1, 80)).sum().backward()
    optimizer.step()
    if how == "channels_last":
        net.to(memory_format=torch.channels_last)
    else:  # the memory stays the same
        net.weight.data = net.weight.data.t() if how == "transposed" else net.weight.data[:40]
    with raises(ValueError, "parameter '0.0' has another dtype, device, shape or memory format"):
        optimizer.step()


@pytest.mark.parametrize("how", ["channels_last", "transposed", "cut"])
def test_sharded_optimizer_refuses_another_memory_format(ranks: RankPool, how: str) -> None:
    ranks.run(2, _formats, how)
    ranks.run(1, _nothing)


def _under_join(rank: int, world: int) -> None:
    wrapped = DistributedDataParallel(_model(5))
    optimizer = _sharded(wrapped)
    with raises(RuntimeError, "ShardedOptimizer needs every rank"), wrapped.join():
        _backward(wrapped)
        optimizer.step()


def test_sharded_optimizer_under_join_is_refused(ranks: RankPool) -> None:
    ranks.run(2, _under_join)


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        if dist.get_rank() == 1:
            raise ArithmeticError("no more numbers")


def _nothing(rank: int, world: int) -> None:
    pass


def _raises(rank: int, world: int, how: str) -> None:
    model = _model()
    plain, failing = _sharded(model, torch.optim.SGD), _sharded(model, Fails)
    if how == "added":
        extra = nn.Parameter(torch.ones(20_000))
        failing.add_param_group({"params": [extra]})
        extra.grad = torch.ones(20_000)
    _backward(model)
    plain.step()
    everything = [p for group in failing.param_groups for p in group["params"]]
    if how == "changed":
        for p in everything:
            p.data = p.data * 2
    before = [p.detach().clone() for p in everything]

    def closure(*_: Any) -> None:
        if rank == 1:
            raise ArithmeticError("no more numbers")

    if how == "pre-hook":
        failing.register_step_pre_hook(closure)
    begin = time.monotonic()
    with raises(ArithmeticError if rank == 1 else RuntimeError, "no more numbers"):
        # over NCCL, a step is only enqueued, and a later one finds the failure
        while time.monotonic() - begin < 20:
            if how == "closure":
                plain.step(closure)
            else:
                failing.step()
            check(DEVICE != "cpu", "no error")
            time.sleep(0.2)
    check(time.monotonic() - begin < 20, "the others waited")
    for p, old in zip(everything, before, strict=True):
        check_equal(p.detach(), old, "parameters")


@pytest.mark.parametrize("how", ["step", "closure", "pre-hook", "added", "changed"])
def test_sharded_optimizer_step_that_raises_leaves_all_ranks_before_it(
    ranks: RankPool, how: str
) -> None:
    ranks.run(3, _raises, how)
    # another number of ranks makes the pool create a new group, as this one is unusable
    ranks.run(1, _nothing)


def _after_a_failure(rank: int, world: int, channel: str) -> None:
    """Neither this optimizer nor another one of the group steps after a failed step."""
    with host_channel(channel):
        model = _model()
        failing, other = _sharded(model, Fails), _sharded(model, torch.optim.SGD)
        wrapper = DistributedDataParallel(nn.Linear(8, 3))
        _backward(model)
        before = [p.detach().clone() for p in model.parameters()]
        with raises(ArithmeticError if rank == 1 else RuntimeError):
            failing.step()
        for optimizer in (failing, other):
            with raises(RuntimeError, "an earlier step of a ShardedOptimizer"):
                optimizer.step()
        for call in (lambda: failing.consolidate_state_dict(to=None), failing.sharded_state_dict):
            with raises(RuntimeError, f"rank {rank}: a step of this ShardedOptimizer has failed"):
                call()
        for call in (
            lambda: DistributedDataParallel(nn.Linear(3, 3)),
            lambda: other.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
            lambda: _sharded(nn.Linear(3, 3)),
            lambda: _backward(wrapper),
            lambda: wrapper.weighted_mean(torch.ones(())),
            lambda: other.load_sharded_state_dict("none"),
        ):
            with raises(RuntimeError, "an earlier collective of this process group has failed"):
                call()
        for p, old in zip(model.parameters(), before, strict=True):
            check_equal(p.detach(), old, "parameters")


def _after_a_late_backward(rank: int, world: int) -> None:
    """Hazard: where the late rank's backward succeeds, a step would publish shares that were
    stepped with other gradients."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    _backward(ddp)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 1:
        time.sleep(4)
    try:
        _backward(ddp, 1)
        check(rank == 1, "rank 0 did not wait in vain")
    except RuntimeError:
        pass
    with raises(RuntimeError):
        optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        check_equal(p.detach(), old, "parameters")


@pytest.mark.skipif(DEVICE != "cpu", reason="over NCCL, a later call fails")
def test_sharded_optimizer_refuses_gradients_of_a_backward_that_failed(ranks: RankPool) -> None:
    ranks.run(2, _after_a_late_backward)


@pytest.mark.skipif(DEVICE != "cpu", reason="over NCCL, a later call fails")
@pytest.mark.parametrize("channel", ["1", "0"])
def test_sharded_optimizer_refuses_to_go_on_after_a_failure(ranks: RankPool, channel: str) -> None:
    ranks.run(3, _after_a_failure, channel)
    ranks.run(1, _nothing)


def _goes_on(rank: int, world: int) -> None:
    """The collective that a rank calls after its failure is not taken for its parameters."""
    with host_channel("0"):
        model = _model()
        optimizer = _sharded(model, Fails)
        _backward(model)
        before = [p.detach().clone() for p in model.parameters()]
        pieces = optimizer._shares.core.shards()
        most = max(sum(4 * (end - begin) for _, begin, end in of) for of in pieces)
        mine = torch.full([(most + 7) // 8 * 8 + 8], 77, dtype=torch.uint8)  # as publish() sends
        if rank == 1:
            with raises(ArithmeticError):
                optimizer.step()
            received = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(received, mine, async_op=True)  # no other rank takes part
        else:
            with raises(RuntimeError):  # it may have heard of the failure before
                optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            check_equal(p.detach(), old, "parameters")


@pytest.mark.skipif(DEVICE != "cpu", reason="over NCCL, a later call fails")
def test_sharded_optimizer_takes_nothing_else_for_parameters(ranks: RankPool) -> None:
    ranks.run(2, _goes_on)
    ranks.run(1, _nothing)


def _other_order(rank: int, world: int, channel: str) -> None:
    with host_channel(channel):
        models = [nn.Linear(64, 64), nn.Linear(64, 64)]
        optimizers = [_sharded(model) for model in models]
        before = []
        for model in models:
            model.weight.grad = torch.ones(64, 64)
            before.append(model.weight.detach().clone())
        with raises(RuntimeError):  # the slower one may hear it from the other
            optimizers[rank].step()
        for model, old in zip(models, before, strict=True):
            check_equal(model.weight.detach(), old, "parameters")


@pytest.mark.skipif(DEVICE != "cpu", reason="over NCCL, a later call fails")
@pytest.mark.parametrize("channel", ["1", "0"])
def test_sharded_optimizers_stepped_in_different_orders_raise(
    ranks: RankPool, channel: str
) -> None:
    ranks.run(2, _other_order, channel)
    ranks.run(1, _nothing)


def _amp_resumes(rank: int, world: int, early: bool) -> None:
    """At O2 with whole master weights, which sharing moves when a state is loaded."""

    def made(sharded: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        model = nn.Linear(40, 200)
        optimizer: Any = (
            _sharded(model, lr=0.01) if sharded else torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        return amp.initialize(  # type: ignore[return-value]
            model, optimizer, opt_level="O2", cast_model_type=torch.bfloat16, loss_scale=8.0,
            verbosity=0,
        )  # fmt: skip

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        x = torch.sin(torch.arange(200.0).view(5, 40) * (number + 1))
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()

    results = []
    for sharded in (True, False):
        model, optimizer = made(sharded)
        for number in range(2):
            step(model, optimizer, number)
        if sharded:
            optimizer.consolidate_state_dict(to=None)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        forget_amp()
        model, optimizer = made(sharded)
        if early:
            step(model, optimizer, 9)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for number in range(2, 4):
            step(model, optimizer, number)
        extra = nn.Parameter(torch.full((70, 70), 0.3, dtype=torch.bfloat16))
        optimizer.add_param_group({"params": [extra]})
        step(model, optimizer, 4)
        results.append([p.detach().clone() for p in model.parameters()])
        forget_amp()
    for mine, theirs in zip(*results, strict=True):
        check_equal(mine, theirs, "parameters")
    check_same_on_all_ranks(results[0], "parameters")


@pytest.mark.parametrize("early", [False, True])
def test_sharded_optimizer_with_amp_resumes_and_takes_groups(ranks: RankPool, early: bool) -> None:
    ranks.run(2, _amp_resumes, early)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    args = parser.parse_args()
    with RankPool() as pool:
        _run(pool, args.first, args.cases, says=True)
    print(f"{args.cases} cases from {args.first} on: all agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
