# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer(shard_master_weights=True) with amp at level O2.

The reference is the plain optimizer with amp at O2, in the same process and with the same
gradients. All comparisons are bitwise.

More random programs: ``python python/tests/test_sharded_masters.py --cases 200``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_support import (
    DEVICE,
    RankPool,
    check,
    check_equal,
    check_same_on_all_ranks,
    raises,
)
from sharded_cases import OPTIMIZERS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from apex import amp
from apex.optimizers import ShardedOptimizer
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

OPTIONS: dict[str, dict[str, Any]] = {
    name: {**OPTIMIZERS[name][1], **({"eps": 1e-3} if "adam" in name else {})}
    for name in ("momentum", "adamw", "adamw_fused", "fused_adam", "fused_lamb", "muon", "own")
}


def _net(name: str) -> nn.Module:
    torch.manual_seed(3)
    bias = name != "muon"
    net = nn.Sequential(nn.Linear(95, 130, bias=bias))
    if bias:
        net.append(nn.Conv2d(16, 97, 3).to(memory_format=torch.channels_last))
        net.append(nn.BatchNorm2d(97))  # stays float32
    net.append(nn.Linear(130, 95, bias=bias))
    if bias:
        net.append(nn.Linear(5, 5).requires_grad_(False))
        net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
        net.register_parameter("never", nn.Parameter(torch.ones(7)))
    return net


class Run:
    """A model at O2 with a sharded (`group` is given) or the plain optimizer."""

    def __init__(self, name: str, dtype: torch.dtype, group: Any = None, **options: Any) -> None:
        self.net = _net(name)
        kind, defaults = OPTIMIZERS[name][0], OPTIONS[name]
        held = list(self.net.named_parameters())
        groups = [{"params": held[:1], "lr": 0.003}, {"params": held[1:]}]
        self.optimizer: Any
        if group is None:
            self.optimizer = kind(groups, **defaults)
        else:
            self.optimizer = ShardedOptimizer(
                groups, kind, group, shard_master_weights=True, **defaults
            )
        self.net, self.optimizer = amp.initialize(
            self.net,
            self.optimizer,
            opt_level="O2",
            cast_model_type=dtype,
            loss_scale="dynamic",
            verbosity=0,
            **options,
        )

    def backward(self, step: int, overflow: bool = False, **options: Any) -> None:
        """Gradients as backward in scale_loss leaves them, the same on every rank."""
        torch.manual_seed(100 + step)
        with amp.scale_loss(torch.ones(()), self.optimizer, **options) as loss:
            for name, p in self.net.named_parameters():
                if p.requires_grad and name != "never":
                    grad = (torch.randn_like(p, dtype=torch.float32) * float(loss) / 64).to(p.dtype)
                    p.grad = grad if p.grad is None else p.grad + grad
            if overflow:
                next(p for p in self.net.parameters() if p.grad is not None).grad.fill_(torch.inf)

    def step(self, step: int, clip: float = 0.0) -> None:
        if clip:
            self.norm = nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)


def _check_as(mine: Run, other: Run, what: str) -> None:
    for (name, p), q in zip(mine.net.named_parameters(), other.net.parameters(), strict=True):
        check_equal(p.detach(), q.detach(), f"{what}: {name}")
    check_same_on_all_ranks([p.detach() for p in mine.net.parameters()], what)
    for a, b in zip(mine.optimizer.param_groups, other.optimizer.param_groups, strict=True):
        for key, value in b.items():  # torch adds settings after a load
            # on a GPU, the plain FusedAdam also counts steps that amp skips
            if key != "params" and (key != "step" or DEVICE == "cpu"):
                check_equal(repr(a[key]), repr(value), f"{what}: {key}")


def _tensors(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            for path, leaf in _tensors(value[key]):
                yield f"{key}.{path}", leaf
    else:
        yield "", value


def _check_state(mine: Run, other: Run, what: str) -> None:
    """The state dict of the sharded optimizer is the plain one's, with the master weights."""
    mine.optimizer.consolidate_state_dict(to=None)
    found, expected = mine.optimizer.state_dict(), other.optimizer.state_dict()
    check_equal(list(found), list(expected), "entries")
    if dist.get_world_size() > 1:
        check(found["amp_master_weights"], "no master weights")
    for key in (k for k in expected if k != "param_groups"):
        pairs = zip(_tensors(found[key]), _tensors(expected[key]), strict=True)
        for (path, a), (path_too, b) in pairs:
            check_equal(path, path_too, f"{what}: entries")
            check_equal(a, b.cpu() if isinstance(b, Tensor) else b, f"{what}: {path}")


def _trains(rank: int, world: int, name: str, dtype: torch.dtype) -> None:
    mine, plain = Run(name, dtype, dist.group.WORLD), Run(name, dtype)
    for step in range(8):
        for run in (mine, plain):
            if step == 5:  # two contexts
                run.backward(90, delay_unscale=True)
                run.backward(91)
            if step == 6:
                run.backward(92)
            # on a GPU, a fused optimizer has a state after a step that was skipped
            run.backward(step, overflow=step in ((0, 3) if DEVICE == "cpu" else (3,)))
            run.step(step, clip=0.5 if step in (2, 5) else 0.0)
        if step in (2, 5):
            check_equal(mine.norm, plain.norm, "norm")
        _check_as(mine, plain, f"step {step}")
        if step in (0, 1, 4, 7):
            _check_state(mine, plain, f"step {step}")
    masters = [p for p in amp.master_params(mine.optimizer) if p.isnan().all()]
    check(len(masters) >= 2, "no master weight is sharded")


@pytest.mark.parametrize(
    ("world", "name", "dtype"),
    [
        (2, "adamw", torch.float16),
        (3, "adamw_fused", torch.bfloat16),
        (4, "fused_adam", torch.float16),
        (3, "momentum", torch.bfloat16),
        (2, "fused_lamb", torch.float16),
        (3, "muon", torch.bfloat16),
        (2, "own", torch.float16),
    ],
)
def test_sharded_masters_step_as_whole_ones(
    ranks: RankPool, world: int, name: str, dtype: torch.dtype
) -> None:
    ranks.run(world, _trains, name, dtype)


def _saves(rank: int, world: int, folder: str) -> None:
    mine = Run("adamw", torch.float16, dist.group.WORLD)
    for step in range(3):
        mine.backward(step)
        mine.step(step)
    state = mine.optimizer.sharded_state_dict()
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    mine.optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        file = {
            "model": mine.net.state_dict(),
            "optimizer": mine.optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        torch.save(file, f"{folder}/whole.pt")


def _resumes(rank: int, world: int, folder: str) -> None:
    """With other ranks, by three ways of loading; the model before or after the optimizer.

    One rank would have started from the values before the cast. So its plain optimizer loads, too.
    """
    file = torch.load(f"{folder}/whole.pt", weights_only=False)
    plain = Run("adamw", torch.float16)
    if world > 1:
        for step in range(3):
            plain.backward(step)
            plain.step(step)
    else:
        plain.net.load_state_dict(file["model"])
        plain.optimizer.load_state_dict(copy.deepcopy(file["optimizer"]))
        for scaler in plain.optimizer._amp_stash.scalers:
            scaler.load_state_dict(file["amp"]["loss_scaler0"])
    runs = [Run("adamw", torch.float16, dist.group.WORLD) for _ in range(3)]
    runs[0].net.load_state_dict(file["model"])
    runs[0].optimizer.load_state_dict(copy.deepcopy(file["optimizer"]))
    first = runs[1].net if world == 1 else runs[1].optimizer  # one rank takes what comes last
    for part in (first, runs[1].net if world > 1 else runs[1].optimizer):
        if part is runs[1].net:
            part.load_state_dict(file["model"])
        else:
            part.load_sharded_state_dict(folder)
    runs[2].net.load_state_dict(plain.net.state_dict())
    runs[2].optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    again = Run("adamw", torch.float16)  # the plain optimizer loads the sharded one's
    again.net.load_state_dict(file["model"])
    again.optimizer.load_state_dict(copy.deepcopy(file["optimizer"]))
    for run in (*runs, again):
        for scaler, of_plain in zip(
            run.optimizer._amp_stash.scalers, plain.optimizer._amp_stash.scalers, strict=True
        ):
            scaler.load_state_dict(of_plain.state_dict())
    for i, run in enumerate(runs):
        _check_state(run, plain, f"loaded by way {i}")
    for step in range(3, 6):
        for run in (*runs, again, plain):
            run.backward(step, overflow=step == 3)
            run.step(step)
        for i, run in enumerate((*runs, again)):
            _check_as(run, plain, f"way {i}, step {step}")


def test_sharded_masters_resume_with_other_ranks(ranks: RankPool, tmp_path: pathlib.Path) -> None:
    ranks.run(2, _saves, str(tmp_path))
    for world in (3, 2, 1):
        ranks.run(world, _resumes, str(tmp_path))


def _grows(rank: int, world: int) -> None:
    """Parameters that are added later, unfrozen, and written by the script."""
    runs = Run("adamw", torch.float16, dist.group.WORLD), Run("adamw", torch.float16)
    for step in range(6):
        for run in runs:
            if step == 2:
                extra = nn.Parameter(torch.full((300, 50), 0.3, dtype=torch.float16))
                run.net.register_parameter("extra", extra)
                run.optimizer.add_param_group({"params": [("extra", extra)], "lr": 0.3})
            if step == 4:  # as if a checkpoint of the model had been loaded
                state = run.net.state_dict()
                run.net.load_state_dict({k: v.half().float() * 2 for k, v in state.items()})
            if step == 3:
                last = next(m for m in run.net if isinstance(m, nn.Linear) and m.in_features == 5)
                last.requires_grad_(True)
            run.backward(step)
            run.step(step)
        _check_as(*runs, f"step {step}")
    _check_state(*runs, "grown")


def test_sharded_masters_follow_added_and_loaded_parameters(ranks: RankPool) -> None:
    ranks.run(3, _grows)


def _with_wrapper(rank: int, world: int) -> None:
    """Backward of the wrapper, with other data on each rank; the inputs of one overflow."""
    runs = []
    for group in (dist.group.WORLD, None):
        torch.manual_seed(rank)
        run = Run("momentum", torch.float16, group)
        wrapped = DistributedDataParallel(run.net[0])
        for step in range(6):
            for part in range(2):
                torch.manual_seed(1000 * step + 10 * part + rank)
                x = torch.randn(4, 95) * (1e6 if (step, rank, part) == (2, 1, 0) else 1.0)
                with contextlib.ExitStack() as stack:
                    if part == 0:
                        stack.enter_context(wrapped.no_sync())
                    loss = wrapped(x.half()).float().square().mean()
                    scaled = stack.enter_context(amp.scale_loss(loss, run.optimizer))
                    scaled.backward()
            if step % 2:
                nn.utils.clip_grad_norm_(amp.master_params(run.optimizer), 0.1)
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs.append(run)
    _check_as(*runs, "with the wrapper")
    _check_state(*runs, "with the wrapper")


def test_sharded_masters_with_the_wrapper_and_accumulation(ranks: RankPool) -> None:
    ranks.run(3, _with_wrapper)


def _mistakes(rank: int, world: int) -> None:
    run = Run("momentum", torch.float16, dist.group.WORLD)
    run.backward(0)
    with raises(TypeError, "shard_master_weights must be True or False"):
        ShardedOptimizer(run.net.parameters(), torch.optim.SGD, shard_master_weights="yes")
    scalar, *_, master = (p for p in amp.master_params(run.optimizer) if p.isnan().any())
    with raises(RuntimeError, "more than one element"), torch.no_grad():
        master.add_(1)
    with torch.no_grad():
        scalar.zero_()
    with raises(RuntimeError, "has been written, and each rank has only a piece of it"):
        run.backward(1)


def test_sharded_masters_cannot_be_written(ranks: RankPool) -> None:
    ranks.run(2, _mistakes)


def _memory(rank: int, world: int, shard: bool) -> None:
    """Bytes of all new tensors of the process that Python knows."""
    before = _storages()  # they stay until the end, so that no new one takes their address
    net = nn.Linear(600, 500, bias=False)
    optimizer: Any = ShardedOptimizer(
        net.parameters(), torch.optim.AdamW, shard_master_weights=shard
    )
    net, optimizer = amp.initialize(net, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(net(torch.ones(2, 600)).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del loss
    found = sum(one.nbytes() for at, one in _storages().items() if at not in before)
    # Half parameters, float32 master weights, and two float32 entries of state per element.
    count = 600 * 500
    expected = 2 * count + 8 * count / world + 4 * count / (world if shard else 1)
    check(abs(found - expected) < 0.02 * expected, f"{found} bytes, expected {expected}")


def _storages() -> dict[int, torch.UntypedStorage]:
    """Storages by address; a test that compiled may have left tensors that have none."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor)]
    storages = [one.untyped_storage() for one in tensors if not isinstance(one, FakeTensor)]
    return {one.data_ptr(): one for one in storages}


@pytest.mark.parametrize("shard", [False, True])
def test_sharded_masters_take_the_memory_of_a_share(ranks: RankPool, shard: bool) -> None:
    for world in (2, 3):
        ranks.run(world, _memory, shard)


def _random(rank: int, world: int, folder: str, seeds: list[int]) -> None:
    for seed in seeds:
        try:
            _program(rank, world, f"{folder}/{seed}", random.Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {world} ranks: {error}") from error


def _program(rank: int, world: int, folder: str, pick: random.Random) -> None:
    name = pick.choice(list(OPTIONS))
    dtype = pick.choice([torch.float16, torch.bfloat16])
    mine, plain = Run(name, dtype, dist.group.WORLD), Run(name, dtype)
    added = 0
    for step in range(pick.randint(3, 8)):
        clip = pick.choice([0.0, 0.0, 0.3])
        earlier = [pick.randrange(100, 200) for _ in range(pick.choice([0, 0, 1, 2]))]
        delayed = [pick.random() < 0.5 for _ in earlier]
        overflow = pick.random() < 0.2 and (DEVICE == "cpu" or step > 0)
        event = pick.choice(["", "", "resume", "dcp", "add", "freeze", "write"])
        if event in ("resume", "dcp") and not added:
            mine = _resumed(mine, plain, name, dtype, f"{folder}.{step}" if event == "dcp" else "")
        written = {k: v.to(dtype).float() * 1.5 for k, v in mine.net.state_dict().items()}
        for run in (mine, plain):
            if event == "add" and name != "muon":
                extra = nn.Parameter(torch.full((70, 70), 0.3, dtype=pick.choice([dtype] * 2)))
                run.net.register_parameter(f"extra{added}", extra)
                run.optimizer.add_param_group({"params": [(f"extra{added}", extra)], "lr": 0.01})
            if event == "freeze":
                run.net[0].weight.requires_grad_(not run.net[0].weight.requires_grad)
                run.net[0].weight.grad = None
            if event == "write":
                run.net.load_state_dict(written)
            for number, delay in zip(earlier, delayed, strict=True):
                run.backward(number, delay_unscale=delay)
            run.backward(step, overflow=overflow)
            run.step(step, clip)
        added += event == "add" and name != "muon"
        _check_as(mine, plain, f"{name} {dtype} step {step} {event}")
    _check_state(mine, plain, f"{name} {dtype}")


def _resumed(mine: Run, plain: Run, name: str, dtype: torch.dtype, folder: str) -> Run:
    """A new model and optimizer with the state of the old ones."""
    frozen = not mine.net[0].weight.requires_grad
    new = Run(name, dtype, dist.group.WORLD)
    new.net.load_state_dict(plain.net.state_dict())
    for scaler, old in zip(
        new.optimizer._amp_stash.scalers, mine.optimizer._amp_stash.scalers, strict=True
    ):
        scaler.load_state_dict(old.state_dict())
    if folder:
        dcp.save({"optimizer": mine.optimizer.sharded_state_dict()}, checkpoint_id=folder)
        new.optimizer.load_sharded_state_dict(folder)
    else:
        mine.optimizer.consolidate_state_dict(to=None)
        new.optimizer.load_state_dict(mine.optimizer.state_dict())
    if frozen:  # after loading, which gives only trainable parameters their master weights
        new.net[0].weight.requires_grad_(False)
    return new


def _run(pool: RankPool, folder: str, first: int, count: int) -> None:
    for world in (2, 3, 4):
        seeds = [seed for seed in range(first, first + count) if seed % 3 == world - 2]
        for begin in range(0, len(seeds), 10):
            pool.run(world, _random, folder, seeds[begin : begin + 10], timeout_s=240)


def test_sharded_masters_random_programs_step_as_whole_ones(
    ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    _run(ranks, str(tmp_path), 0, 6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    args = parser.parse_args()
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        _run(pool, folder, args.first, args.cases)
    print(f"{args.cases} cases from {args.first} on: all agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
