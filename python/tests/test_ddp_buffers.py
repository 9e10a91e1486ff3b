"""broadcast_buffers: coalesced, and without breaking two forwards before a backward."""

from __future__ import annotations

import pytest
import torch
from ddp_support import RankPool, check, check_near, check_same_on_all_ranks, gradients
from torch import nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.sin(torch.arange(20, dtype=torch.float32).view(5, 4) * (1 + rank) + step)


def _two_forwards(rank: int, world: int) -> None:
    model = make()
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    means: dict[str, torch.Tensor] = {}
    for r in range(world):
        reference = make()
        (reference(batch(r, 0)).square().sum() + reference(batch(r, 1)).sum()).div(world).backward()
        for name, grad in gradients(reference).items():
            means[name] = means.get(name, 0) + grad
    first = ddp(batch(rank, 0))
    second = ddp(batch(rank, 1))  # takes rank 0's running statistics, which `first` has saved
    (first.square().sum() + second.sum()).backward()
    for name, grad in gradients(ddp).items():
        check_near(grad, means[name], name, 1e-4)
    ddp(batch(rank, 2)) if rank == 0 else ddp(batch(0, 2))
    check_same_on_all_ranks(list(model.buffers()), "buffers after alike forwards")


def test_broadcast_buffers_two_forwards_before_backward(ranks: RankPool) -> None:
    ranks.run(2, _two_forwards)


class Masked(nn.Module):
    """Its buffer is read in backward, and differs from rank to rank between forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.factor * x).sum()


def _reads_in_backward(rank: int, world: int) -> None:
    model = Masked()
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    first = ddp(torch.ones(4))
    with torch.no_grad():
        model.factor = model.factor + rank  # a new tensor: what `first` saved is not touched
    second = ddp(torch.ones(4))
    (first + second).backward()
    check(torch.equal(model.weight.grad, torch.full((4,), 2.0)), str(model.weight.grad))


def test_broadcast_buffers_replaced_buffer_is_not_written_through(ranks: RankPool) -> None:
    ranks.run(2, _reads_in_backward)


def _is_refused(rank: int, world: int) -> None:
    model = Masked()
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    first = ddp(torch.ones(4))
    model.factor.data.add_(rank)  # unseen by autograd; the next forward makes it rank 0's again
    ddp(torch.ones(4))
    error = None
    with ddp.no_sync():
        try:
            first.backward()
        except RuntimeError as caught:
            error = caught
    # Its backward would read another value than its forward did.
    check((error is not None) == (rank == 1), f"rank {rank}: {error}")


def test_broadcast_buffers_that_backward_reads_are_an_error(ranks: RankPool) -> None:
    ranks.run(2, _is_refused)
