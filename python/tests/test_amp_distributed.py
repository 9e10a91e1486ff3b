# SPDX-License-Identifier: BSD-3-Clause
"""Several ranks: an overflow on one of them skips the step on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from amp_support import fresh_amp  # noqa: F401
from ddp_support import RankPool, forget_amp, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from apex import amp
from apex.amp import _amp_state
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def build(level: str, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=1, **options)


def iterate(model: nn.Module, optimizer: Any, overflow: bool) -> None:
    """One step whose gradients no data-parallel wrapper reduces."""
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(2, 3)).float().mean(), optimizer) as scaled:
        scaled.backward()
        if overflow:
            model.weight.grad[0, 0] = float("nan")
    optimizer.step()


def assert_same_on_all_ranks(value: float) -> None:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert len(set(values)) == 1, values


@on_ranks(2)
def test_overflow_on_one_rank_skips_on_all(rank: int, world: int) -> None:
    # One pair of processes for all levels, because starting them takes most of the time.
    for level in ("O1", "O2", "O3"):
        _skips_together_at(rank, level)


def _skips_together_at(rank: int, level: str) -> None:
    model, optimizer = build(level, loss_scale="dynamic")
    for step in range(4):
        before = model.weight.detach().clone()
        # Step 0: rank 1 overflows. Step 2: rank 0 does. Steps 1 and 3: no rank does.
        iterate(model, optimizer, overflow=(step, rank) in ((0, 1), (2, 0)))
        assert torch.equal(before, model.weight) == (step in (0, 2)), step
        assert_same_on_all_ranks(model.weight.float().sum().item())
    scaler = _amp_state.loss_scalers[0]
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**14, 1)


def _prints_once(rank: int, world: int, folder: str) -> None:
    import contextlib
    import pathlib

    with open(pathlib.Path(folder) / str(rank), "w") as out, contextlib.redirect_stdout(out):
        model, optimizer = build("O2")
        iterate(model, optimizer, overflow=rank == 1)


def test_overflow_message_and_options_are_printed_by_rank_0_only(
    ranks: RankPool, tmp_path: Any
) -> None:
    ranks.run(2, _prints_once, str(tmp_path))
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert "Gradient overflow" in first and "optimization level" in first and second == ""


@on_ranks(2)
def test_overflow_group_false_or_static_scale_does_not_communicate(rank: int, world: int) -> None:
    model, optimizer = build("O2", overflow_group=False)
    if rank == 1:
        # Only this rank scales a loss, so it must not wait for the other.
        iterate(model, optimizer, overflow=True)
        assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15
    else:
        assert _amp_state.loss_scalers[0].loss_scale() == 2.0**16
    model, optimizer = build("O2", loss_scale=128.0)
    if rank == 0:
        iterate(model, optimizer, overflow=False)


@on_ranks(3)
def test_overflow_group_limits_who_skips(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model, optimizer = build("O2", overflow_group=groups[rank // 2])
    iterate(model, optimizer, overflow=rank == 1)
    assert _amp_state.loss_scalers[0].loss_scale() == (2.0**16 if rank == 2 else 2.0**15)


@on_ranks(2)
def test_scales_that_differ_raise_on_every_rank(rank: int, world: int) -> None:
    """On rank 0, the scale or the number of clean steps differs."""
    for level in ("O1", "O2", "O3"):
        for saved, first in (({"loss_scale": 1024.0}, 1024), ({"unskipped": 1999}, 131072)):
            model, optimizer = build(level, loss_scale="dynamic")
            if rank == 0:
                amp.load_state_dict({"loss_scaler0": {**amp.state_dict()["loss_scaler0"], **saved}})
            if "unskipped" in saved:
                iterate(model, optimizer, overflow=False)  # the last one before it grows
            message = (
                f"rank {rank} of 2: the loss scales of the ranks differ \\({first} on 0; 65536 on "
                "1\\).*amp.load_state_dict on every rank"
            )
            with pytest.raises(RuntimeError, match=message):
                iterate(model, optimizer, overflow=False)
            forget_amp()


@on_ranks(2)
def test_step_with_gradients_left_scaled_names_the_rank(rank: int, world: int) -> None:
    model, optimizer = build("O1")
    with amp.scale_loss(model(torch.ones(2, 3)).mean(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    with pytest.raises(RuntimeError, match=f"^rank {rank}: SGD.step.. was called with gradients"):
        optimizer.step()


@on_ranks(2)
def test_one_more_step_of_master_weights_is_out_of_step(rank: int, world: int) -> None:
    model, optimizer = build("O2", loss_scale=1.0)
    ddp = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="rank 1 made another number of optimizer steps"):
        for step in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(ddp(torch.ones(2, 3)).float().mean(), optimizer) as scaled:
                scaled.backward()
            for _ in range(1 + (rank == step == 1)):
                optimizer.step()


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def _losses(level: str, mesh: Any, rank: int) -> list[float]:
    """Each rank has the same batches, so that sharding changes nothing in exact arithmetic."""
    model = _mlp()
    if mesh is not None:
        for module in (model[2], model):
            # By default, the root keeps the weights gathered in the forward before the step.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, max_loss_scale=2.0**8
    )
    losses = []
    for step in range(6):
        x = torch.rand(16, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if step == 2 and _amp_state.loss_scalers[0].dynamic:
                grad = model[0].weight.grad  # only one rank has the overflowing value
                grad = grad if mesh is None else grad.to_local()
                if mesh is None or rank == 1:
                    grad[-1, 0] = float("inf")
        # Casts of the gathered weights, which the step and the next gathering change unnoticed.
        assert model(x).requires_grad
        optimizer.step()
        losses.append(loss.item())
    forget_amp()
    return losses


@on_ranks(2)
def test_fully_shard_at_o1_trains_as_one_process_and_casting_levels_are_refused(
    rank: int, world: int
) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for level in ("O1", "O1-bf16"):
        mine, want = _losses(level, mesh, rank), _losses(level, None, rank)
        assert mine == pytest.approx(want, rel=1e-5), (level, mine, want)
        assert len(set(want)) == len(want), "the weights did not change"
    for level in ("O2", "O3-bf16"):
        model = _mlp()
        fully_shard(model[2], mesh=mesh)
        with pytest.raises(RuntimeError, match="the parameter '2.*fully_shard.*level O1"):
            amp.initialize(model, opt_level=level, verbosity=0)
