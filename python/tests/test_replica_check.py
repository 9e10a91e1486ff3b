# SPDX-License-Identifier: BSD-3-Clause
"""replica_check_every and on_divergence detect ranks that do not hold the same parameters."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import check, check_equal, notices, on_ranks, raises
from torch import nn

from apex.parallel import DistributedDataParallel, SyncBatchNorm

pytestmark = pytest.mark.processes

EVERY = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.plain = nn.BatchNorm1d(24)  # its buffers may differ by rank
        self.synchronized = SyncBatchNorm(24)
        self.last = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.synchronized(self.plain(self.first(x))))
        return y


def made(**options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Net(), **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)


def train(ddp: nn.Module, optimizer: Any, rank: int, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 6) + rank).square().mean().backward()
        optimizer.step()


def _other_weights(ddp: DistributedDataParallel) -> None:
    with torch.no_grad():
        ddp.module.first.weight.add_(1)
        ddp.module.last.bias.add_(1)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_replica_check_finds_and_names_flipped_bits(rank: int, world: int) -> None:
    for seed in range(15):
        pick = random.Random(seed)
        victim = pick.randrange(world)
        ddp, optimizer = made(
            replica_check_every=EVERY, on_divergence="raise",
            gradient_as_bucket_view=pick.random() < 0.5,
        )  # fmt: skip
        train(ddp, optimizer, rank, 3)
        name, parameter = pick.choice(sorted(ddp.module.named_parameters()))
        # Through .data, so that the version does not change.
        memory = parameter.data.view(-1).view(torch.uint8)
        at, bit = pick.randrange(memory.numel()), pick.randrange(8)
        if rank == victim:
            memory[at] = int(memory[at]) ^ (1 << bit)
        optimizer.param_groups[0]["lr"] = 0.0  # no step rounds the flip away
        who = f"rank {victim} holds a different state than the other ranks: "
        if world == 2:
            who = "(rank 1 differs from rank 0, and no state has a majority): "
        with raises(RuntimeError, f"{who}parameter '{name}' differs"):
            train(ddp, optimizer, rank, EVERY + 1)


class Own(Net):
    """Rank-specific state that a correct program may have."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.zeros(7), requires_grad=False)
        self.register_buffer("queue", torch.zeros(7))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.queue[self.steps % 7] = self.bank.data[self.steps % 7] = float(dist.get_rank())
        return super().forward(x)


@on_ranks(3)
def test_replica_check_reports_nothing_of_a_correct_program(rank: int, world: int) -> None:
    """Hazard: a message about a correct program."""
    with notices() as texts:
        for options in (
            {"replica_check_every": EVERY},
            {},  # the default
            {"replica_check_every": 1, "broadcast_buffers": True},
            {"replica_check_every": 3, "gradient_average": "weighted"},
        ):
            net = Own()
            ddp = DistributedDataParallel(net, **options)  # type: ignore[arg-type]
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
            for step in range(110):
                context = ddp.weight(1 + rank) if "gradient_average" in options else None
                with context or contextlib.nullcontext():
                    train(ddp, optimizer, rank)
                if step == 50:  # as a script that resumes
                    net.load_state_dict(copy.deepcopy(net.state_dict()))
    check_equal(texts, [], "messages")


@on_ranks(3)
def test_replica_check_warns_and_raises(rank: int, world: int) -> None:
    text = "rank 2 holds a different state than the other ranks: parameter 'first.weight' differs"
    # "warn", the default: after 1, 2, 4, ... differences, by rank 0 and in its logger.
    ddp, optimizer = made(replica_check_every=1)
    with notices(4 if rank == 0 else 0) as texts:
        train(ddp, optimizer, rank, 3)
        if rank == 2:
            _other_weights(ddp)
        train(ddp, optimizer, rank, 12)
    check_equal(len(texts), 4 if rank == 0 else 0, "messages")
    for number, one in enumerate(texts):
        check(text in one and "and so do 1 more of " in one, one)
        check(("probably because" in one) == (number == 0), f"causes are named once: {one}")
    # "raise": on every rank, in the same step, and again until it is fixed.
    ddp, optimizer = made(replica_check_every=1, on_divergence="raise")
    train(ddp, optimizer, rank, 3)
    kept = copy.deepcopy(ddp.state_dict())
    if rank == 2:
        _other_weights(ddp)
    for _ in range(2):
        with raises(RuntimeError, f"rank {rank}: {text}", "backward number"):
            train(ddp, optimizer, rank)
    ddp.load_state_dict(kept)
    train(ddp, optimizer, rank)


@on_ranks(2)
def test_replica_check_begins_again_after_a_round_without_a_difference(
    rank: int, world: int
) -> None:
    ddp, optimizer = made(replica_check_every=1)
    kept = copy.deepcopy(ddp.state_dict())
    with notices(6 if rank == 0 else 0) as texts:
        for _ in range(2):
            train(ddp, optimizer, rank)
            if rank == 1:
                _other_weights(ddp)
            train(ddp, optimizer, rank, 5)  # the first, second and fourth are reported
            ddp.load_state_dict(kept)
            train(ddp, optimizer, rank, 4)
    check_equal(len(texts), 6 if rank == 0 else 0, f"messages: {texts}")


@on_ranks(2)
def test_replica_check_after_local_updates_of_one_rank(rank: int, world: int) -> None:
    """Hazard: ranks that count other backwards take other decisions, and wait for each other."""
    ddp, optimizer = made()

    def differ() -> None:
        kept = copy.deepcopy(ddp.module.state_dict())
        if rank == 1:
            _other_weights(ddp)
        train(ddp, optimizer, rank, 101)
        ddp.module.load_state_dict(kept)

    with notices(3 if rank == 0 else 0) as texts:
        train(ddp, optimizer, rank, 3)
        differ()  # two parameters, so two differences
        for _ in range(35):  # harmless: undone before the synchronized backward
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.randn(8, 6)).square().mean().backward()
            optimizer.zero_grad()
            if rank == 1:
                before = ddp.module.last.bias.detach().clone()
                with torch.no_grad():
                    ddp.module.last.bias.add_(1)
                    ddp.module.last.bias.copy_(before)
            train(ddp, optimizer, rank)
        train(ddp, optimizer, rank, 180)
        differ()
    check_equal(len(texts) > 2, rank == 0, f"messages: {texts}")


@on_ranks(3)
def test_replica_check_compares_what_was_loaded_at_once(rank: int, world: int) -> None:
    """Parameters that differ after load_state_dict() are found in the next backward, not in 100."""
    for how in ("ddp", "module", "skipped", "rank 1"):
        ddp, optimizer = made(on_divergence="raise")
        train(ddp, optimizer, rank, 3)
        kept = copy.deepcopy(ddp.module.state_dict())
        other = {**kept, "last.bias": kept["last.bias"] + rank}
        if how == "module":
            ddp.module.load_state_dict(other)
        elif how != "rank 1" or rank == 1:
            ddp.load_state_dict({f"module.{name}": value for name, value in other.items()})
        if how == "skipped":
            ddp.skip_step()
            train(ddp, optimizer, rank)
        who = "rank 1 holds a different state" if how == "rank 1" else "hold the same state"
        with raises(RuntimeError, who, "parameter 'last.bias' differs"):
            train(ddp, optimizer, rank)
        ddp.module.load_state_dict(kept)
        train(ddp, optimizer, rank, 3)


@on_ranks(2)
def test_replica_check_options(rank: int, world: int) -> None:
    for wrong in (-1, 1.5, True, "often"):
        with raises(ValueError, "replica_check_every must be a number of steps"):
            made(replica_check_every=wrong)
    with raises(ValueError, "on_divergence must be 'raise' or 'warn', got 'ignore'"):
        made(on_divergence="ignore")
    with raises(RuntimeError, "replica_check_every"):
        made(replica_check_every=1 + rank)
    # Nothing is compared: disabled, or ranks may differ on purpose. By default within 100 steps.
    options: list[dict[str, Any]] = [
        {"replica_check_every": 0}, {"init_sync": False}, {"check_reduction": False}, {},
    ]  # fmt: skip
    for each in options:
        ddp, optimizer = made(**each)
        with notices(rank == 0 and not each) as texts:
            train(ddp, optimizer, rank, 2)
            if rank == 1:
                _other_weights(ddp)
            train(ddp, optimizer, rank, 102)
        check_equal(len(texts) > 0, rank == 0 and not each, f"messages with {each}")
