# SPDX-License-Identifier: BSD-3-Clause
"""broadcast_buffers: coalesced, and without breaking two forwards before a backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from ddp_support import check, check_same_on_all_ranks, on_ranks, raises
from torch import nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


class Masked(nn.Module):
    """Its buffer is read in backward, and differs by rank between forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.factor * x).sum()


@on_ranks(2)
def test_broadcast_buffers_replaced_buffer_is_not_written_through(rank: int, world: int) -> None:
    model = Masked()
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    first = ddp(torch.ones(4))
    with torch.no_grad():
        model.factor = model.factor + rank  # a new tensor, so the saved one is not changed
    second = ddp(torch.ones(4))
    (first + second).backward()
    check(torch.equal(model.weight.grad, torch.full((4,), 2.0)), str(model.weight.grad))


@on_ranks(2)
def test_broadcast_buffers_that_backward_reads_are_an_error(rank: int, world: int) -> None:
    model = Masked()
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    first = ddp(torch.ones(4))
    # invisible to autograd; the next forward broadcasts rank 0's again
    model.factor.data.add_(rank)
    ddp(torch.ones(4))
    # Rank 1's backward would read a different value than its forward did.
    with ddp.no_sync(), raises(RuntimeError) if rank == 1 else contextlib.nullcontext():
        first.backward()


class Bits(nn.Module):
    """A layer, and unused tensors of every kind, which differ on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        zeros = torch.zeros(3) * (-1.0) ** (rank + 1)  # -0.0 on rank 0
        nan = torch.tensor([float("nan"), 1.0 + rank])
        pairs = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * (1 + rank)
        large = torch.arange(2.0**18).reshape(2, -1) + rank
        several = torch.zeros(2, 9 << 19)  # several messages; only the first differs
        several[0, 0] = rank
        tensors = {
            "zeros": zeros,
            "narrow_zeros": zeros.to(torch.bfloat16),
            "nan": nan,
            "conjugated": pairs.conj(),
            "negated": pairs.conj().imag,
            "complex32": pairs.to(torch.complex32),
            "complex32_column": torch.stack([pairs, pairs], 1)[:, 0].to(torch.complex32),
            "float8": nan.to(torch.float8_e4m3fn),
            "large": large,
            "large_turned": large.clone().t(),
            "large_conjugated": torch.complex(large, large).conj(),
            "several_turned": several.t(),
            "flag": torch.tensor([rank == 0]),
        }
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
            parameter = nn.Parameter(tensor.clone(), requires_grad=False)
            self.register_parameter(f"frozen_{name}", parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@on_ranks(2)
def test_broadcast_takes_every_bit_of_every_dtype(rank: int, world: int) -> None:
    model, first = Bits(rank), Bits(0)
    ddp = DistributedDataParallel(model, broadcast_buffers=True)

    def check_all(what: str, kinds: list[str]) -> None:
        for name in model.names:
            for kind in kinds:
                mine, other = (getattr(m, f"{kind}{name}") for m in (model, first))
                check(torch.equal(_bits(mine), _bits(other)), f"{kind}{name} {what}: {mine}")

    check_all("after construction", ["", "frozen_"])
    versions = {name: getattr(model, name)._version for name in model.names}
    ddp(torch.ones(1, 4)).sum().backward()
    small = [name for name in model.names if not name.startswith("large")]
    for name in small:  # a forward whose backward is pending may have saved it
        check(getattr(model, name)._version == versions[name], f"{name}, unchanged, was written to")
    with torch.no_grad():
        for name in model.names:
            getattr(model, name).copy_(getattr(Bits(rank), name))
    ddp(torch.ones(1, 4))
    check_all("after forward", [""])


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("last", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


CHANGES = {
    "larger": lambda model: setattr(model, "first", torch.ones(7)),
    "smaller": lambda model: setattr(model, "first", torch.ones(1)),
    "another_dtype": lambda model: setattr(model, "last", torch.ones(2, dtype=torch.float64)),
    "registered": lambda model: model.register_buffer("more", torch.ones(5)),
    "first": lambda model: setattr(model, "first", torch.ones(3)),
    "removed": lambda model: setattr(model, "last", None),
    "all_removed": lambda model: [setattr(model, name, None) for name in ("first", "last")],
}


@on_ranks(2)
def test_broadcast_buffers_that_change_alike_are_taken(rank: int, world: int) -> None:
    model = Changing()
    empty = torch.ones(3)[:0] if rank == 0 else torch.empty(0)  # alike: one has memory
    model.register_buffer("empty", empty)
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    for change in CHANGES.values():
        change(model)
        for step in range(2):
            with torch.no_grad():
                for buffer in model.buffers():
                    buffer.fill_(rank + step + 5)
            ddp(torch.ones(1, 4)).sum().backward()
            for name, buffer in model.named_buffers():
                check(bool((buffer == step + 5).all()), f"{name}: {buffer}")


@pytest.mark.parametrize(("change", "culprit"), [
    ("larger", 0), ("another_dtype", 1), ("registered", 1), ("all_removed", 0), ("first", 1),
])  # fmt: skip
@on_ranks(3)
def test_broadcast_buffers_that_change_on_one_rank_raise_on_all(
    rank: int, world: int, change: str, culprit: int
) -> None:
    model = Changing()
    if change == "first":  # no rank has a buffer when the models are compared
        CHANGES["all_removed"](model)
    # not the group of other tests, because a collective of it fails
    ddp = DistributedDataParallel(model, process_group=dist.new_group(), broadcast_buffers=True)
    ddp(torch.ones(1, 4)).sum().backward()
    if rank == culprit:
        CHANGES[change](model)
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    said = ["in different collectives", "comparison of the models", "broadcast of buffers"]
    said += [f"buffers of rank {rank} have changed"] * (rank == culprit)
    with raises(RuntimeError, *said):
        ddp(torch.ones(1, 4)).sum().backward()
    for name, buffer in model.named_buffers():
        check(rank != culprit or torch.equal(buffer, own[name]), f"{name} was written to")
    dist.barrier()
    model = Changing()
    again = DistributedDataParallel(model, broadcast_buffers=True)
    again(torch.ones(1, 4)).sum().backward()
    check_same_on_all_ranks(list(model.buffers()), "buffers of the next wrapper")
