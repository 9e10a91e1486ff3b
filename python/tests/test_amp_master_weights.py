# SPDX-License-Identifier: BSD-3-Clause
"""Master weights on several ranks are equal, however the parameters became equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, check, check_equal, check_same_on_all_ranks, forget_amp, on_ranks
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from apex import amp
from apex.fp16_utils import FP16_Optimizer
from apex.parallel import DistributedDataParallel, Reducer
from apex.parallel.distributed import flat_dist_call
from apex.parallel.LARC import LARC

pytestmark = pytest.mark.processes


def _sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _build(seed: int, level: str, make: Callable[..., Any] = _sgd) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    return amp.initialize(
        model, make(model.parameters()), opt_level=level, loss_scale=64.0, verbosity=0
    )


def _broadcast_each(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model


def _broadcast_flat(model: nn.Module) -> nn.Module:
    flat_dist_call([p.data for p in model.parameters()], dist.broadcast, (0,))
    return model


def _broadcast_by_reducer(model: nn.Module) -> nn.Module:
    Reducer(model)
    return model


#: Ways to broadcast rank 0's parameters. The last ones do not change gradients.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "apex": DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
    "flat_dist_call": _broadcast_flat,
    "broadcast": _broadcast_each,
    "Reducer": _broadcast_by_reducer,
}


def _train(wrapped: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    reduced = isinstance(wrapped, (DistributedDataParallel, nn.parallel.DistributedDataParallel))
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = wrapped(torch.randn(6, 5, generator=generator)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if not reduced:
            flat_dist_call([p.grad for p in amp.master_params(optimizer)], dist.all_reduce)
        optimizer.step()


def _parameters_of(model: nn.Module) -> dict[str, Tensor]:
    names = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.state_dict().items() if name in names}


def _check_ranks(model: nn.Module, optimizer: Any, what: str) -> None:
    check_same_on_all_ranks([p.detach() for p in model.parameters()], f"{what}: parameters")
    masters = list(amp.master_params(optimizer))
    check_same_on_all_ranks([m.detach() for m in masters], f"{what}: master weights")
    check_same_on_all_ranks(list(_parameters_of(model).values()), f"{what}: state_dict")
    for parameter, master in zip(model.parameters(), masters, strict=True):
        check_equal(master.detach().to(parameter.dtype), parameter.detach(), f"{what}: rounded")


@on_ranks(2)
def test_master_weights_seed_per_rank_are_the_same_on_every_rank(rank: int, world: int) -> None:
    for level in ("O2", "O2-bf16", "O3"):
        for way, share in WAYS.items():
            for early in (False, True):
                what = f"{level}, {way}, early={early}"
                model, optimizer = _build(rank, level)
                if early:
                    # creates the masters of parameters that are not broadcast yet
                    optimizer.zero_grad()
                wrapped = share(model)
                _train(wrapped, optimizer, rank, range(4))
                _check_ranks(model, optimizer, what)


@on_ranks(2)
def test_initialize_after_wrapping_averages_gradients(rank: int, world: int) -> None:
    # As in mmengine's ApexOptimWrapper: inside the first iteration, with the wrapped module.
    for level in ("O1", "O2", "O3"):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        wrapped = DistributedDataParallel(model)
        optimizer = _sgd(model.parameters())
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
        )
        _train(wrapped, optimizer, rank, range(4))
        _check_ranks(model, optimizer, level)
        forget_amp()


@on_ranks(2)
def test_fp16_optimizer_made_before_the_broadcast_is_the_same_on_every_rank(
    rank: int, world: int
) -> None:
    for way in ("apex", "torch", "broadcast"):
        torch.manual_seed(rank)
        model = nn.Linear(5, 2).half()
        optimizer = FP16_Optimizer(_sgd(model.parameters()), static_loss_scale=64.0)
        wrapped = WAYS[way](model)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((3, 5), 0.5 + step + (0 if way == "broadcast" else rank)).half()
            optimizer.backward(wrapped(x).float().square().mean())
            optimizer.step()
        check_same_on_all_ranks([p.detach() for p in model.parameters()], f"{way}: parameters")
        masters = [m.detach() for m in optimizer.all_fp32_from_fp16_params]
        check_same_on_all_ranks(masters, f"{way}: master weights")


def _model_and_masters(seed: int) -> tuple[nn.Module, Any]:
    model, optimizer = _build(seed, "O2")
    optimizer.zero_grad()
    return model, optimizer


def _saves(rank: int, world: int, path: str) -> list[Tensor]:
    """Masters with bits that the model's parameters do not have."""
    model, optimizer = _build(7, "O2")
    _train(DistributedDataParallel(model), optimizer, rank, range(3))
    if rank == 0:
        torch.save((model.state_dict(), optimizer.state_dict()), path)
    dist.barrier()
    return [m.detach().numpy() for m in amp.master_params(optimizer)]


def _loads(rank: int, world: int, path: str, masters: list[Any]) -> None:
    for first in (0, 1):
        model, optimizer = _model_and_masters(50 + rank)
        saved = torch.load(path)
        for index in (first, 1 - first):
            (model, optimizer)[index].load_state_dict(saved[index])
        DistributedDataParallel(model)
        with amp.scale_loss(model(torch.ones(2, 5)).sum() * 0, optimizer) as scaled:
            scaled.backward()
        for mine, want in zip(amp.master_params(optimizer), masters, strict=True):
            check_equal(mine.detach(), torch.from_numpy(want), f"{world} ranks, {first} first")
        forget_amp()


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
def test_checkpoint_of_another_number_of_ranks_keeps_all_bits(
    ranks: RankPool, tmp_path: Any, worlds: tuple[int, int]
) -> None:
    path = str(tmp_path / "checkpoint.pt")
    masters = ranks.run(worlds[0], _saves, path)[0]
    assert any((m != torch.from_numpy(m).half().float().numpy()).any() for m in masters)
    ranks.run(worlds[1], _loads, path, masters)


def test_written_parameter_is_followed_before_and_after_the_first_step() -> None:
    try:
        model, optimizer = _model_and_masters(0)
        for _ in range(2):
            with torch.no_grad():
                model[0].weight[0] = 2.0
            with amp.scale_loss(model(torch.ones(2, 5)).sum() * 0, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            check_equal(next(amp.master_params(optimizer))[0].detach(), torch.full((5,), 2.0), "")
    finally:
        forget_amp()


@pytest.mark.parametrize("how", ["initialize", "LARC"])
@on_ranks(1)
def test_zero_redundancy_optimizer_with_master_weights_is_refused(
    rank: int, world: int, how: str
) -> None:
    model = nn.Linear(2, 1)
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="ZeroRedundancyOptimizer.* O1"):
        given = LARC(optimizer) if how == "LARC" else optimizer
        amp.initialize(model, given, opt_level="O2", verbosity=0)
    check(not hasattr(optimizer, "_amp_stash"), "it has a stash")
    check_equal(model.weight.dtype, torch.float32, "the model's dtype")
