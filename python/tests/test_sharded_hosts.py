# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer with ranks on several hosts. The reference is the plain optimizer, bitwise."""

from __future__ import annotations

import copy
import datetime
import pathlib
import tempfile
import time
from typing import Any

import hosts_support
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_support import check, check_equal, check_same_on_all_ranks, forget_amp, raises
from hosts_support import run_on_hosts
from torch import nn

from apex import amp
from apex.optimizers import ShardedOptimizer
from apex.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        bool(hosts_support.why_not()), reason=f"no namespaces: {hosts_support.why_not()}"
    ),
]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 4000), nn.Tanh(), nn.Linear(4000, 3))


def _backward(model: nn.Module, rank: int, step: int) -> None:
    torch.manual_seed(1000 * step + rank)
    model.zero_grad()
    model(torch.randn(4, 30)).square().mean().backward()


def _pair(rank: int, kind: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """A wrapped model with its sharded optimizer, and a copy with the plain one."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(_model())
    twin = copy.deepcopy(ddp.module)
    sharded = ShardedOptimizer(ddp.parameters(), kind, lr=0.01, ddp=ddp, **options)
    return ddp, sharded, twin, kind(twin.parameters(), lr=0.01)


def _step(pair: tuple[Any, Any, Any, Any], rank: int, step: int) -> None:
    ddp, sharded, twin, plain = pair
    _backward(ddp, rank, step)
    for p, q in zip(ddp.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad.clone()
    sharded.step()
    plain.step()
    for p, q in zip(ddp.parameters(), twin.parameters(), strict=True):
        check_equal(p.detach(), q.detach(), f"step {step}")
    check_same_on_all_ranks([p.detach() for p in ddp.parameters()], f"step {step}")


def _elements(optimizer: ShardedOptimizer) -> int:
    return sum(t.numel() for of in optimizer.state.values() for t in of.values() if t.dim() > 0)


def _steps(rank: int, world: int, sharing: list[int], options: dict[str, Any]) -> None:
    for kind in (torch.optim.AdamW, torch.optim.RMSprop):
        pair = ddp, sharded, _, plain = _pair(rank, kind, options)
        for step in range(3):
            _step(pair, rank, step)
        everything = sum(
            t.numel() for of in plain.state.values() for t in of.values() if t.dim() > 0
        )
        check(
            abs(_elements(sharded) * sharing[rank] - everything) < 0.05 * everything,
            f"{_elements(sharded)} of {everything} elements of state",
        )
        for to in range(world):
            sharded.consolidate_state_dict(to=to)
            if rank != to:
                continue
            found, expected = sharded.state_dict()["state"], plain.state_dict()["state"]
            for key, held in expected.items():
                for name, value in held.items():
                    check_equal(found[key][name], value, f"{name} of {key} on rank {to}")


@pytest.mark.parametrize(
    ("hosts", "sharing", "options"),
    [
        ([2, 2], [2, 2, 2, 2], {}),
        ([3, 1], [3, 3, 3, 1], {}),
        ([1, 1], [2, 2], {}),
        ([1, 1], [1, 1], {"across_hosts": False}),
        ([2, 1], [3, 3, 3], {"across_hosts": True}),
    ],
)
def test_sharded_optimizer_shares_within_hosts(
    hosts: list[int], sharing: list[int], options: dict[str, Any]
) -> None:
    run_on_hosts(hosts, _steps, sharing, options)


def _reduce_scattered(rank: int, world: int, across: bool | None) -> None:
    """Oracle: the all-reduce. The order of sums differs, so it is not bitwise."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(_model())
    twin = DistributedDataParallel(copy.deepcopy(ddp.module))
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    options: dict[str, Any] = {"lr": 1e-3, "ddp": ddp, "reduce_scatter": True}
    if across:
        with raises(ValueError, "pass across_hosts=True"):
            ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, **options)
    sharded = ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, across_hosts=across, **options)
    for step in range(3):
        for model in (ddp, twin):
            _backward(model, rank, step)
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        torch.testing.assert_close(sharded.clip_grad_norm_(0.5), norm)
        sharded.step()
        plain.step()
    for p, q in zip(ddp.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    check_same_on_all_ranks([p.detach() for p in ddp.parameters()], "parameters")


@pytest.mark.parametrize(("hosts", "across"), [([1, 1], None), ([2, 1], True)])
def test_sharded_optimizer_reduce_scatters_across_hosts(
    hosts: list[int], across: bool | None
) -> None:
    run_on_hosts(hosts, _reduce_scattered, across)


def _in_subgroup(rank: int, world: int) -> None:
    """The ranks of a subgroup on two hosts; rank 3 has its own."""
    group = dist.new_group([0, 1, 2])
    alone = dist.new_group([3])
    torch.manual_seed(rank)
    model = _model()
    made = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, group if rank < 3 else alone, lr=0.1
    )
    sizes = [dist.get_world_size(made._group)]
    check_equal(sizes, [[2], [2], [1], [1]][rank], "ranks that share")
    for step in range(2):
        _backward(model, 0, step)
        made.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    if rank < 3:
        everything = [torch.empty_like(flat) for _ in range(3)]
        dist.all_gather(everything, flat, group=group)
        check(all(torch.equal(one, flat) for one in everything), "other bits")


def test_sharded_optimizer_in_a_subgroup_on_two_hosts() -> None:
    run_on_hosts([2, 2], _in_subgroup)


def _saves(rank: int, world: int, folder: str) -> None:
    pair = ddp, sharded, _, plain = _pair(rank, torch.optim.AdamW, {})
    for step in range(2):
        _step(pair, rank, step)
    state = {"model": ddp.module.state_dict(), "optimizer": sharded.sharded_state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/pieces")
    if rank == 0:
        torch.save(plain.state_dict(), f"{folder}/plain.pt")


def _loads(rank: int, world: int, folder: str) -> None:
    ddp, sharded, _, plain = _pair(rank, torch.optim.AdamW, {})
    model = {"model": ddp.module.state_dict()}
    dcp.load(model, checkpoint_id=f"{folder}/pieces")
    sharded.load_sharded_state_dict(f"{folder}/pieces")
    plain.load_state_dict(torch.load(f"{folder}/plain.pt"))
    sharded.consolidate_state_dict(to=None)
    found, expected = sharded.state_dict()["state"], plain.state_dict()["state"]
    for key, held in expected.items():
        for name, value in held.items():
            check_equal(found[key][name], value, f"{name} of {key}")


def test_sharded_optimizer_checkpoint_with_other_hosts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_hosts([3, 1], _saves, folder)
        check(pathlib.Path(folder, "pieces", ".metadata").exists(), "no checkpoint")
        run_on_hosts([2, 2], _loads, folder)
        run_on_hosts([2], _loads, folder)


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        if dist.get_rank() == 1:
            raise ArithmeticError("no more numbers")


def _fails(rank: int, world: int) -> None:
    """The ranks of the host raise in the step, those of the other host in the next backward."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    ddp = DistributedDataParallel(_model(), process_group=group)
    optimizer = ShardedOptimizer(ddp.parameters(), Fails, lr=0.1, ddp=ddp)
    _backward(ddp, rank, 0)
    before = [p.detach().clone() for p in ddp.parameters()]
    begin = time.monotonic()
    if rank < 2:
        with raises(ArithmeticError if rank == 1 else RuntimeError, "no more numbers"):
            optimizer.step()
        for p, old in zip(ddp.parameters(), before, strict=True):
            check_equal(p.detach(), old, "parameters")
    else:
        optimizer.step()
        with raises(RuntimeError, "no more numbers"):
            _backward(ddp, rank, 1)
    check(time.monotonic() - begin < 15, "the others waited")


def test_sharded_optimizer_failure_is_heard_on_other_hosts() -> None:
    run_on_hosts([2, 2], _fails)


def _lone_fails(rank: int, world: int) -> None:
    """A rank that is alone on its host, whose step raises in the middle."""
    ddp = DistributedDataParallel(_model())
    optimizer = ShardedOptimizer(ddp.parameters(), Fails, lr=0.1, across_hosts=False)
    _backward(ddp, rank, 0)
    before = [p.detach().clone() for p in ddp.parameters()]
    if rank == 1:
        with raises(ArithmeticError):
            optimizer.step()
        for call in (optimizer.consolidate_state_dict, optimizer.sharded_state_dict):
            with raises(RuntimeError, "a step of this ShardedOptimizer has failed"):
                call()
    else:
        optimizer.step()
    changed = any(
        not torch.equal(p.detach(), old) for p, old in zip(ddp.parameters(), before, strict=True)
    )
    check(changed == (rank == 0), "parameters")


def test_sharded_optimizer_rank_alone_on_its_host_undoes_its_step() -> None:
    run_on_hosts([1, 1], _lone_fails)


def _refuses(rank: int, world: int) -> None:
    """Only the last rank's parameters are unusable."""
    ddp = _model()
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    shared = torch.zeros(20)
    more = [nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))]
    if rank == world - 1:
        more = [nn.Parameter(shared[:10]), nn.Parameter(shared[5:15])]
    begin = time.monotonic()
    error, text = (
        (ValueError, "shares memory")
        if rank == world - 1
        else (RuntimeError, f"parameters=usable, rank {world - 1} with parameters=refused")
    )
    for call in (
        lambda: optimizer.add_param_group({"params": more}),
        lambda: ShardedOptimizer(more, torch.optim.SGD, lr=0.1),
    ):
        with raises(error, text):
            call()
    check(time.monotonic() - begin < 15, "the others waited")
    _backward(ddp, rank, 0)
    optimizer.step()  # the group is usable


def test_sharded_optimizer_refused_on_one_host_is_heard_on_the_others() -> None:
    run_on_hosts([2, 1], _refuses)


def _disagree(rank: int, world: int) -> None:
    with raises(RuntimeError, "across_hosts=True", "across_hosts=False"):
        ShardedOptimizer(_model().parameters(), torch.optim.SGD, lr=0.1, across_hosts=rank == 0)
    with raises(TypeError, "across_hosts must be True, False or None, got str"):
        ShardedOptimizer(_model().parameters(), torch.optim.SGD, lr=0.1, across_hosts="no")


def test_sharded_optimizer_ranks_that_disagree_on_hosts_raise() -> None:
    run_on_hosts([1, 1], _disagree)


def _half(rank: int, world: int, shard: bool) -> None:
    """amp at O2 where a host has one rank only."""
    results = []
    for sharded in (True, False):
        torch.manual_seed(3)
        model: Any = _model()
        optimizer: Any = (
            ShardedOptimizer(
                model.parameters(), torch.optim.AdamW, lr=0.01, shard_master_weights=shard
            )
            if sharded
            else torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O2", cast_model_type=torch.bfloat16, verbosity=0
        )
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.randn(4, 30)).square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
        forget_amp()
    for mine, theirs in zip(*results, strict=True):
        check_equal(mine, theirs, "parameters")


@pytest.mark.parametrize("shard", [False, True])
def test_sharded_optimizer_with_amp_where_a_host_has_one_rank(shard: bool) -> None:
    run_on_hosts([2, 1], _half, shard)


def _unreadable(rank: int, world: int, folder: str) -> None:
    """All ranks raise if one cannot read the checkpoint."""
    _, sharded, _, _ = _pair(rank, torch.optim.AdamW, {})
    with raises(dcp.CheckpointException, "metadata"):
        sharded.load_sharded_state_dict(folder if rank != 1 else folder + "no")


def test_sharded_optimizer_checkpoint_that_one_rank_cannot_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_hosts([3, 1], _saves, folder)
        run_on_hosts([2, 1], _unreadable, f"{folder}/pieces")
