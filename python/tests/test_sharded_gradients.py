# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer with reduce_scatter=True. The reference is a twin in one process, in float64 for
averages and norms, that gets the batches of all ranks.

More cases: ``python python/tests/test_sharded_gradients.py --cases 1000``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import pickle
import random
import sys
from typing import Any

import pytest
import torch
from ddp_support import (
    DEVICE,
    RankPool,
    check,
    check_equal,
    check_same_on_all_ranks,
    host_channel,
    raises,
)
from torch import Tensor, nn

from apex import amp
from apex.optimizers import FusedLAMB, ShardedOptimizer
from apex.parallel import DistributedDataParallel, OverlappedOptimizer

pytestmark = pytest.mark.processes

CASES = 12


class _Net(nn.Module):
    """With a layer in channels_last, one that few batches use, and a shared one."""

    def __init__(self, pick: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        width = pick.choice([40, 700])
        self.conv = nn.Conv2d(3, pick.choice([8, 70]), 3, padding=1, dtype=dtype)
        if pick.random() < 0.5:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = self.conv.out_channels * 16
        self.first = nn.Linear(inputs, width, dtype=dtype)
        self.seldom = nn.Linear(width, width, dtype=dtype)
        self.shared = nn.Linear(width, width, dtype=dtype)
        self.frozen = nn.Linear(3, 3, dtype=dtype).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))
        self.empty = nn.Parameter(torch.ones(0, dtype=torch.float16))  # a bucket of its own
        self.phase = nn.Parameter(
            torch.ones(width, dtype=dtype if dtype == torch.bfloat16 else dtype.to_complex())
        )

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        y = torch.tanh(self.first(self.conv(x).flatten(1)))
        if seldom:
            y = y + self.seldom(y)
        y = self.shared(torch.tanh(self.shared(y)))
        y = y + self.empty.sum()
        return y * (self.phase.real + (self.phase.imag if self.phase.is_complex() else 0))


def _own(optimizer: ShardedOptimizer, parameter: Tensor) -> Tensor:
    """Which elements of the parameter this rank steps, by their layout in memory."""
    mask = torch.zeros_like(parameter, dtype=torch.bool)
    flat = mask.as_strided((mask.numel(),), (1,))
    for _, (index, begin, end) in optimizer._shares.own:
        if optimizer._shares.parameters[index] is parameter:
            flat[begin:end] = True
    return mask


def _run_case(rank: int, world: int, seed: int) -> None:
    pick = random.Random(seed)
    dtype = pick.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    options: dict[str, Any] = {
        "message_size": pick.choice([900, 20000, 10**7]),
        "gradient_as_bucket_view": pick.random() < 0.5,
        "delay_allreduce": pick.random() < 0.2,
        "allreduce_always_fp32": pick.random() < 0.3,
    }
    weighted = pick.random() < 0.3
    if weighted:
        options["gradient_average"] = "weighted"
    whole = pick.choice([None, True])
    views = options["gradient_as_bucket_view"]
    torch.manual_seed(seed + rank)  # the constructor broadcasts rank 0's values
    net = _Net(pick, dtype)
    with host_channel(pick.choice("01")):
        ddp = DistributedDataParallel(net, **options)
        twin = copy.deepcopy(net).double()
        for p in twin.parameters():
            if p.is_complex():
                p.data = p.data.to(torch.complex128)
        kind, arguments = pick.choice(
            [
                (torch.optim.AdamW, {"lr": 1e-3}),
                (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
                (torch.optim.SGD, {"lr": 0.01, "foreach": True}),
            ]
        )
        optimizer = ShardedOptimizer(
            ddp.parameters(), kind, ddp=ddp, reduce_scatter=True, whole_parameters=whole,
            **arguments,
        )  # fmt: skip
    for step in range(5):
        optimizer.zero_grad(set_to_none=pick.random() < 0.5 and not views)
        twin.zero_grad()
        parts = pick.choice([1, 1, 3])
        batches = [[pick.randint(1, 4) for _ in range(world)] for _ in range(parts)]
        used = [[pick.random() < 0.3 for _ in range(world)] for _ in range(parts)]
        sums = [torch.zeros_like(p) for p in twin.parameters()]
        touched = [False] * len(sums)
        total = sum(map(sum, batches)) if weighted else world
        for part in range(parts):
            last = part == parts - 1
            for r in range(world):
                generator = torch.Generator().manual_seed(seed * 1000 + step * 100 + part * 10 + r)
                x = torch.randn(batches[part][r], 3, 4, 4, generator=generator, dtype=torch.float64)
                x = x.to(dtype)
                if r == rank:
                    with contextlib.ExitStack() as stack:
                        if not last:
                            stack.enter_context(ddp.no_sync())
                        if weighted:
                            stack.enter_context(ddp.weight(batches[part][r]))
                        loss = ddp(x, used[part][r]).square().mean(1)
                        (loss.sum() if weighted else loss.mean()).backward()
                expected = twin(x.double(), used[part][r]).square().mean(1)
                wanted = [p for p in twin.parameters() if p.requires_grad]
                grads = torch.autograd.grad(
                    expected.sum() if weighted else expected.mean(), wanted, allow_unused=True
                )
                found = dict(zip(map(id, wanted), grads, strict=True))
                for i, p in enumerate(twin.parameters()):
                    grad = found.get(id(p))
                    if grad is not None:
                        sums[i] += grad / total
                        touched[i] = True
        rough = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.2}[dtype]
        squares = 0.0
        for i, (name, p) in enumerate(ddp.module.named_parameters()):
            what = f"seed {seed}, step {step}, {name}"
            if p.grad is None:
                check(not touched[i], f"{what}: no gradient")
                continue
            if not touched[i] or p.numel() == 0:
                check(bool((p.grad.nan_to_num() == 0).all()), f"{what}: a gradient of no rank")
                continue
            mine = _own(optimizer, p)
            # Complete averages of parameters that were not in the plan yet are also right.
            here = ~p.grad.isnan()
            check(bool(here[mine].all()), f"{what}: nan in the share")
            check(bool((here == mine).all() or here.all()), f"{what}: no nan elsewhere")
            error = (p.grad.to(sums[i].dtype) - sums[i])[here].abs()
            scale = max(sums[i].abs().max().item(), 1e-30)
            check(error.numel() == 0 or error.max().item() <= rough * scale, f"{what}: the average")
            squares += sums[i].abs().square().sum().item()
        most = pick.choice([1e9, 0.1, 1e-3])
        norm = optimizer.clip_grad_norm_(most)
        check(abs(norm.item() - squares**0.5) <= rough * squares**0.5, f"seed {seed}: the norm")
        check_same_on_all_ranks([norm], f"seed {seed}: the norm")
        optimizer.step()
        check_same_on_all_ranks([p.detach() for p in ddp.parameters()], f"seed {seed}, step {step}")
        for p, q in zip(ddp.module.parameters(), twin.parameters(), strict=True):
            check(not p.isnan().any(), f"seed {seed}, step {step}: nan in a parameter")
            q.data.copy_(p.data)


def _run_cases(rank: int, world: int, seeds: list[int]) -> None:
    for seed in seeds:
        _run_case(rank, world, seed)


def _run(pool: RankPool, first: int, count: int, says: bool = False) -> None:
    for world in (1, 2, 3, 4):
        seeds = [seed for seed in range(first, first + count) if seed % 4 == world - 1]
        for begin in range(0, len(seeds), 25):
            pool.run(world, _run_cases, seeds[begin : begin + 25], timeout_s=240)
            if says:
                print(f"{world} ranks: {begin + 25} of {len(seeds)} cases agree", flush=True)


def test_reduce_scatter_random_programs_average_as_one_process_does(ranks: RankPool) -> None:
    _run(ranks, 0, CASES)


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 3))


def _made(
    kind: Any = torch.optim.SGD, wrapper: dict[str, Any] | None = None, **options: Any
) -> tuple[DistributedDataParallel, ShardedOptimizer]:
    ddp = DistributedDataParallel(_net(), **(wrapper or {}))
    options = {"lr": 0.1, "reduce_scatter": True, **options}
    return ddp, ShardedOptimizer(ddp.parameters(), kind, ddp=ddp, **options)


def _backward(ddp: nn.Module, rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    loss: Tensor = ddp(torch.randn(4, 8, generator=generator)).square().mean()
    loss.backward()
    return loss


def _equal_to_plain(rank: int, world: int) -> None:
    """With two ranks a sum has one order, so the steps are bitwise those of the all-reduce. LAMB's
    norm is that of two shares."""
    for kind in (torch.optim.AdamW, FusedLAMB):
        ddp, sharded = _made(kind, lr=0.01)
        other, plain = _made(kind, reduce_scatter=False, lr=0.01)
        for step in range(4):
            for model, optimizer in ((ddp, sharded), (other, plain)):
                optimizer.zero_grad()
                _backward(model, rank, step)
                optimizer.step()
            for p, q in zip(ddp.parameters(), other.parameters(), strict=True):
                if kind is FusedLAMB:
                    torch.testing.assert_close(p, q)
                else:
                    check_equal(p.detach(), q.detach(), f"{kind}, step {step}")


def test_reduce_scatter_steps_of_two_ranks_are_those_of_the_all_reduce(ranks: RankPool) -> None:
    ranks.run(2, _equal_to_plain)


def _refusals(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_net())
    for options, error, text in (
        ({"reduce_scatter": 1, "ddp": ddp}, TypeError, "reduce_scatter must be True or False"),
        ({"reduce_scatter": True}, ValueError, "pass the apex.parallel.DistributedDataParallel"),
    ):
        with raises(error, text):
            ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, **options)
    with raises(ValueError, "gradient_average="):
        _made(wrapper={"gradient_average": False})
    alike = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    reordered = [alike.module[i].weight for i in ((0, 1), (1, 0))[rank]]
    with raises(RuntimeError, "is 'module.0.weight'"):
        ShardedOptimizer(reordered, torch.optim.SGD, lr=0.1, ddp=alike)
    ddp, optimizer = _made()
    with raises(ValueError, "are reduce-scattered for another ShardedOptimizer"):
        ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, ddp=ddp)
    with raises(RuntimeError, "a communication hook is already registered"):
        ddp.register_builtin_comm_hook("bf16")
    with raises(RuntimeError, "an OverlappedOptimizer steps whole parameters"):
        OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    other = DistributedDataParallel(_net())
    extra = nn.Parameter(torch.ones(3))
    with raises(ValueError, "has a parameter that is not in the wrapper"):
        ShardedOptimizer([*other.parameters(), extra], torch.optim.SGD, lr=0.1, ddp=other,
                         reduce_scatter=True)  # fmt: skip
    _overlapped = OverlappedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other)
    with raises(RuntimeError, "an OverlappedOptimizer steps whole parameters"):
        ShardedOptimizer(other.parameters(), torch.optim.SGD, lr=0.1, ddp=other,
                         reduce_scatter=True)  # fmt: skip
    with raises(ValueError, "with reduce_scatter=True a rank has only its share"):
        amp.initialize(ddp.module, optimizer, opt_level="O1", verbosity=0)
    _backward(ddp, rank)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0)
    with raises(RuntimeError, "GradScaler searches all gradients for infinities"):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
    optimizer.step()  # nothing has failed


def test_reduce_scatter_refuses_what_needs_whole_gradients(ranks: RankPool) -> None:
    ranks.run(2, _refusals)


def _in_slices(rank: int, world: int) -> None:
    """Messages over sockets that are sent in several slices, the last of them shorter and, with
    whole parameters, of different numbers. Oracle: the plain optimizer after an all-reduce."""
    for whole in (None, True):
        results = []
        with host_channel("0"):
            for reduce_scatter in (True, False):
                torch.manual_seed(4)
                net = nn.Sequential(nn.Linear(700, 3001), nn.Tanh(), nn.Linear(3001, 301))
                ddp = DistributedDataParallel(net, message_size=10**6)
                if reduce_scatter:
                    optimizer: Any = ShardedOptimizer(
                        net.parameters(), torch.optim.SGD, lr=0.1, ddp=ddp, reduce_scatter=True,
                        whole_parameters=whole,
                    )  # fmt: skip
                else:
                    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                for step in range(3):
                    optimizer.zero_grad()
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    ddp(torch.randn(3, 700, generator=generator)).square().mean().backward()
                    optimizer.step()
                results.append([p.detach() for p in net.parameters()])
        for left, right in zip(*results, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
        check_same_on_all_ranks(results[0], "parameters")


def test_reduce_scatter_of_large_messages_over_sockets(ranks: RankPool) -> None:
    for world in (2, 3):
        ranks.run(world, _in_slices)


def _two_optimizers(rank: int, world: int) -> None:
    """Muon for matrices, AdamW for the rest. Oracle: the all-reduce, with sums of two ranks."""
    results = []
    for reduce_scatter in (True, False):
        ddp = DistributedDataParallel(_net(), message_size=1000)
        matrices = [p for p in ddp.parameters() if p.ndim == 2]
        rest = [p for p in ddp.parameters() if p.ndim != 2]
        options = {"ddp": ddp, "reduce_scatter": reduce_scatter}
        muon = ShardedOptimizer(matrices, torch.optim.Muon, lr=0.1, **options)
        if reduce_scatter:
            with raises(RuntimeError, "is in no ShardedOptimizer with reduce_scatter"):
                _backward(ddp, rank)
            ddp.zero_grad()
        adam = ShardedOptimizer(rest, torch.optim.AdamW, lr=0.1, **options)
        for step in range(4):
            ddp.zero_grad()
            _backward(ddp, rank, step)
            muon.step()
            adam.step()
        results.append([p.detach() for p in ddp.parameters()])
    for left, right in zip(*results, strict=True):
        check_equal(left, right, "parameters of two optimizers")


def test_reduce_scatter_of_several_optimizers(ranks: RankPool) -> None:
    ranks.run(2, _two_optimizers)


def _forgotten(rank: int, world: int) -> None:
    # Oracle: a NaN everywhere, which a loss shows, instead of averages that miss a part.
    for wrapper in ({}, {"gradient_as_bucket_view": True}):
        ddp, optimizer = _made(wrapper=wrapper)
        _backward(ddp, rank)
        _backward(ddp, rank, 1)  # without zero_grad()
        for p in ddp.parameters():
            check(bool(p.grad.isnan().all()), "accumulated averages of shares")
    ddp, optimizer = _made()
    _backward(ddp, rank)
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    check(bool(norm.isnan()), "torch's function gives a norm of a share")
    with raises(RuntimeError, "the total norm of order 2.0 of the gradients is nan"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    _backward(ddp, rank)
    check(bool(optimizer.clip_grad_norm_(1.0).isfinite()), "the norm after zero_grad()")


def test_reduce_scatter_what_would_be_wrong_silently_is_nan(ranks: RankPool) -> None:
    ranks.run(2, _forgotten)


def _lives(rank: int, world: int) -> None:
    ddp, optimizer = _made()
    _backward(ddp, rank)
    copied = copy.deepcopy(ddp)
    check(pickle.loads(pickle.dumps(ddp)) is not None, "pickled")
    copied.zero_grad()
    _backward(copied, rank, 1)  # a copy has no optimizer, so it averages
    check(not any(p.grad.isnan().any() for p in copied.parameters()), "a copy all-reduces")
    check_same_on_all_ranks([p.grad for p in copied.parameters()], "a copy all-reduces")
    # Another one, while the first, with which a plan was recorded, is collected on one rank only.
    ddp.zero_grad()
    _backward(ddp, rank)
    kept = [optimizer] if rank == 0 else []
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, ddp=ddp,
                                 reduce_scatter=True, whole_parameters=True)  # fmt: skip
    for step in range(3):
        optimizer.zero_grad()
        _backward(ddp, rank, step)
        optimizer.step()
    check_same_on_all_ranks([p.detach() for p in ddp.parameters()], "a second optimizer")
    check(not any(p.isnan().any() for p in ddp.parameters()), "a second optimizer")
    del kept


def test_reduce_scatter_copies_and_deleted_optimizers(ranks: RankPool) -> None:
    ranks.run(2, _lives)


def _thaws(rank: int, world: int) -> None:
    """A frozen layer joins both in a later group. Oracle: the all-reduce."""
    results = []
    for reduce_scatter in (True, False):
        net = _net()
        net[0].requires_grad_(False)
        ddp = DistributedDataParallel(net)
        optimizer = ShardedOptimizer(net[2].parameters(), torch.optim.SGD, lr=0.1, ddp=ddp,
                                     reduce_scatter=reduce_scatter)  # fmt: skip
        for step in range(6):
            if step == 3:
                net[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(net[0].parameters())})
            optimizer.zero_grad()
            _backward(ddp, rank, step)
            optimizer.step()
        results.append([p.detach() for p in net.parameters()])
    for left, right in zip(*results, strict=True):
        check_equal(left, right, "with a group added later")


def test_reduce_scatter_of_parameters_that_are_added_later(ranks: RankPool) -> None:
    ranks.run(2, _thaws)


def _clips(rank: int, world: int) -> None:
    """Oracle: torch's function on the complete gradients."""
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        ddp, optimizer = _made(reduce_scatter=False)
        _backward(ddp, rank)
        expected = [p.grad.clone() for p in ddp.parameters()]
        twin = copy.deepcopy(ddp.module)
        for p, grad in zip(twin.parameters(), expected, strict=True):
            p.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e-3, norm_type)
        mine = optimizer.clip_grad_norm_(1e-3, norm_type)
        torch.testing.assert_close(mine, norm)
        for p, q in zip(ddp.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    with ddp.join(), raises(RuntimeError, "under join() some have run out of data"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    check(optimizer.clip_grad_norm_(1.0).item() == 0, "the norm without gradients")
    # Empty, too large for float16, and sparse on one rank: refused on all.
    table = nn.Embedding(9, 3, sparse=True)
    empty = nn.Parameter(torch.ones(0, dtype=torch.float16))
    large = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = ShardedOptimizer([empty, large, table.weight], torch.optim.SGD, lr=0.1)
    empty.grad, large.grad = torch.ones_like(empty), torch.full_like(large, 60000.0)
    for norm_type in (2.0, float("inf")):
        expected = large.grad.double().norm(norm_type)
        norm = optimizer.clip_grad_norm_(1e9, norm_type)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    table(torch.tensor([1, 2])).sum().backward()
    with raises(ValueError, "is sparse, and a sharded optimizer cannot step it"):
        optimizer.clip_grad_norm_(1.0)
    net = _net()
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1,
                                 shard_master_weights=True)  # fmt: skip
    net, optimizer = amp.initialize(net, optimizer, opt_level="O2", verbosity=0,
                                    cast_model_type=torch.bfloat16, loss_scale=1.0)  # fmt: skip
    loss = net(torch.ones(4, 8)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    masters = list(amp.master_params(optimizer))
    expected_norm = torch.stack([p.grad.double().norm() for p in masters]).norm()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e-3).double(), expected_norm,
                               rtol=1e-4, atol=0)  # fmt: skip
    again = torch.stack([p.grad.double().norm() for p in masters]).norm()
    check(abs(again.item() - 1e-3) < 1e-5, f"clipped master gradients: {again}")


def test_clip_grad_norm_of_shares_is_that_of_whole_gradients(ranks: RankPool) -> None:
    for world in (1, 3):
        ranks.run(world, _clips)


def _fails(rank: int, world: int) -> None:
    ddp, optimizer = _made()
    _backward(ddp, rank)
    optimizer.step()
    optimizer.zero_grad()
    handle = ddp.module[0].weight.register_hook(lambda grad: grad / (1 // (1 - rank)))
    error: Any = ZeroDivisionError if rank == 1 else RuntimeError
    with raises(
        error, "division or modulo by zero" if rank == 1 else "ended by an exception on rank 1"
    ):
        _backward(ddp, rank, 1)
    handle.remove()
    optimizer.zero_grad()
    _backward(ddp, rank, 1)
    optimizer.step()
    check_same_on_all_ranks([p.detach() for p in ddp.parameters()], "the step after it")
    check(not any(p.isnan().any() for p in ddp.parameters()), "the step after it")


@pytest.mark.skipif(DEVICE != "cpu", reason="over NCCL, a later call fails")
def test_reduce_scatter_backward_that_fails_on_one_rank_raises_on_all(ranks: RankPool) -> None:
    ranks.run(2, _fails)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=1000)
    arguments = parser.parse_args()
    with RankPool() as pool:
        _run(pool, arguments.first, arguments.cases, says=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
