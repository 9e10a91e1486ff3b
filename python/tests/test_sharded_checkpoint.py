# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer with torch.distributed.checkpoint: each rank saves and loads its own pieces.

The references are the state of the plain optimizer in one process, and its further steps. All
comparisons are bitwise.
"""

from __future__ import annotations

import copy
import math
import pathlib
import random
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
    host_channel,
    raises,
)
from sharded_cases import OPTIMIZERS
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from apex.optimizers import ShardedOptimizer
from apex.optimizers._sharded_checkpoint import TensorPiece, boxes_of

pytestmark = pytest.mark.processes


def test_boxes_cover_each_element_of_the_piece_once() -> None:
    for seed in range(300):
        _covers(random.Random(seed))


def _covers(pick: random.Random) -> None:
    sizes = [pick.randint(1, 5) for _ in range(pick.randint(0, 4))]
    whole = torch.arange(float(math.prod(sizes))).view(sizes)
    # the value of an element is its position in memory
    whole = whole.permute(pick.sample(range(len(sizes)), len(sizes)))
    begin = pick.randrange(whole.numel())
    end = pick.randint(begin + 1, whole.numel())
    piece = TensorPiece(whole, begin, torch.arange(float(begin), float(end)))
    found = torch.full(whole.shape, -1.0)
    for offsets, part in piece.chunks:
        place = found[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))]
        assert (place == -1).all()
        place.copy_(part)
    assert torch.equal(found, whole.where((whole >= begin) & (whole < end), -1.0))
    assert len(piece.chunks) <= max(1, 2 * len(sizes) - 1)


def test_boxes_are_rows_where_possible() -> None:
    assert list(boxes_of([4, 10], 5, 38)) == [
        ([0, 5], [1, 5]),
        ([1, 0], [2, 10]),
        ([3, 0], [1, 8]),
    ]


def _net(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters that two, three and four ranks split differently."""
    torch.manual_seed(3)
    bias = name != "muon"
    net = nn.Sequential(nn.Linear(95, 130, bias=bias))
    if bias:  # two, three and four ranks cut it
        net.append(nn.Conv2d(16, 97, 3).to(memory_format=torch.channels_last))
    net.append(nn.Linear(130, 95, bias=bias))
    if bias:
        net.append(nn.Linear(5, 5).requires_grad_(False))
        net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
        net.register_parameter("never", nn.Parameter(torch.ones(7)))
        net.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    return net.to(dtype)


def _gradients(net: nn.Module, step: int) -> None:
    """The same on every rank and in one process."""
    torch.manual_seed(100 + step)
    for name, p in net.named_parameters():
        some = p.requires_grad and name != "never" and p.numel() > 0  # for Adafactor
        p.grad = torch.randn_like(p) if some else None


def _groups(net: nn.Module) -> Any:
    held = list(net.named_parameters())
    return [{"params": held[:1], "weight_decay": 0.01}, {"params": held[1:]}]


def _make(net: nn.Module, name: str, world: int | None, group: Any = None) -> Any:
    kind, options = OPTIMIZERS[name]
    if world is None:
        return kind(_groups(net), **options)
    return ShardedOptimizer(_groups(net), kind, process_group=group, **options)


def _step(net: nn.Module, optimizer: Any, step: int) -> None:
    _gradients(net, step)
    optimizer.step()


def _plain(name: str, dtype: torch.dtype, steps: int) -> tuple[nn.Module, Any]:
    net = _net(name, dtype)
    optimizer = _make(net, name, None)
    for step in range(steps):
        _step(net, optimizer, step)
    return net, optimizer


def _check_as(net: nn.Module, other: nn.Module, what: str) -> None:
    for (name, p), q in zip(net.named_parameters(), other.named_parameters(), strict=True):
        check_equal(p.detach(), q[1].detach(), f"{what}: {name}")


def _check_state(found: Any, expected: Any, what: str) -> None:
    check_equal(sorted(found["state"]), sorted(expected["state"]), f"{what}: whose state")
    for key, held in expected["state"].items():
        check_equal(sorted(found["state"][key]), sorted(held), f"{what}: entries of {key}")
        for name, value in held.items():
            mine = found["state"][key][name]
            if isinstance(value, Tensor):
                check_equal(mine.dtype, value.dtype, f"{what}: dtype of {name} of {key}")
                check_equal(mine.to(value.device), value, f"{what}: {name} of {key}")
            else:
                check_equal(mine, value, f"{what}: {name} of {key}")
    for mine, group in zip(found["param_groups"], expected["param_groups"], strict=True):
        check_equal(repr(sorted(mine.items())), repr(sorted(group.items())), f"{what}: a group")


def _saves(rank: int, world: int, name: str, dtype: torch.dtype, folder: str) -> None:
    net = _net(name, dtype)
    optimizer = _make(net, name, world)
    for step in range(3):
        _step(net, optimizer, step)
    state = optimizer.sharded_state_dict()
    held = [
        (value.flat if isinstance(value, TensorPiece) else value)
        for entries in state["state"].values()
        for value in entries.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    for value in held:  # no copy
        check(
            any(
                value.data_ptr() == own.data_ptr()
                for entries in optimizer.state.values()
                for own in entries.values()
                if isinstance(own, Tensor)
            )
            or not value.numel(),
            "a copy of the state",
        )
    dcp.save({"optimizer": state, "model": net.state_dict()}, checkpoint_id=folder)


def _resumes(rank: int, world: int, name: str, dtype: torch.dtype, folder: str) -> None:
    torch.manual_seed(rank)
    net = _net(name, dtype)
    model = {"model": net.state_dict()}
    dcp.load(model, checkpoint_id=folder)
    net.load_state_dict(model["model"])
    optimizer = _make(net, name, world)
    optimizer.load_sharded_state_dict(folder)
    twin, plain = _plain(name, dtype, 3)
    optimizer.consolidate_state_dict(to=None)
    fresh = _make(twin, name, None)
    fresh.load_state_dict(copy.deepcopy(plain.state_dict()))  # with the entries that torch casts
    _check_state(optimizer.state_dict(), fresh.state_dict(), "loaded")
    for step in range(3, 6):
        _step(net, optimizer, step)
        _step(twin, plain, step)
        _check_as(net, twin, f"step {step}")
    check_same_on_all_ranks([p.detach() for p in net.parameters()], "parameters")


def _plain_loads(folder: str, name: str, dtype: torch.dtype) -> None:
    """The plain optimizer, which loads into the state that a step has created."""
    net, plain = _plain(name, dtype, 3)
    expected = copy.deepcopy(plain.state_dict())
    other = _make(_plain(name, dtype, 1)[0], name, None)
    other.load_state_dict(copy.deepcopy(expected))
    state = other.state_dict()
    for entries in state["state"].values():
        for value in entries.values():
            if isinstance(value, Tensor):
                value.zero_()
    dcp.load({"optimizer": state}, checkpoint_id=folder, no_dist=True)
    other.load_state_dict(state)
    _check_state(other.state_dict(), expected, "loaded by the plain optimizer")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adamw", torch.float32),
        ("fused_adam", torch.bfloat16),
        ("momentum", torch.float64),
        ("sgd", torch.float32),
        ("adagrad", torch.float32),
        ("muon", torch.float32),
        ("adafactor", torch.float32),
        ("own", torch.float32),
    ],
)
def test_sharded_checkpoint_loads_with_other_ranks_and_in_the_plain_optimizer(
    ranks: RankPool, tmp_path: pathlib.Path, name: str, dtype: torch.dtype
) -> None:
    ranks.run(3, _saves, name, dtype, str(tmp_path))
    for world in (3, 1, 2, 4):
        ranks.run(world, _resumes, name, dtype, str(tmp_path))
    if DEVICE == "cpu":  # this process has no GPU
        _plain_loads(str(tmp_path), name, dtype)


def _loads_plain(rank: int, world: int, folder: str, named: bool) -> None:
    net, plain = _plain("adamw", torch.float32, 3)
    other = _net("adamw")
    other.load_state_dict(net.state_dict())
    sharded = _make(other, "adamw", world)
    sharded.load_sharded_state_dict(folder, "of_names" if named else "optimizer")
    sharded.consolidate_state_dict(to=None)
    _check_state(sharded.state_dict(), plain.state_dict(), "loaded")
    for step in range(3, 5):
        _step(net, plain, step)
        _step(other, sharded, step)
    _check_as(other, net, "after steps")


@pytest.mark.skipif(DEVICE != "cpu", reason="this process has no GPU")
@pytest.mark.parametrize("named", [False, True])
def test_sharded_checkpoint_of_the_plain_optimizer_loads(
    ranks: RankPool, tmp_path: pathlib.Path, named: bool
) -> None:
    """`named`: torch's get_optimizer_state_dict has replaced numbers by names of parameters."""
    net, plain = _plain("adamw", torch.float32, 3)
    names = get_optimizer_state_dict(net, plain)
    state = {"optimizer": plain.state_dict(), "of_names": names}
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    for world in (1, 2, 3):
        ranks.run(world, _loads_plain, str(tmp_path), named)


def test_sharded_checkpoint_names_may_be_numbers(ranks: RankPool, tmp_path: pathlib.Path) -> None:
    """torch's names of the parameters of a ParameterList."""

    net = nn.ParameterList([nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(5))])
    plain = torch.optim.AdamW(net.parameters(), lr=0.1)
    for p in net:
        p.grad = torch.ones_like(p)
    plain.step()
    names = get_optimizer_state_dict(net, plain)
    dcp.save({"optimizer": names}, checkpoint_id=str(tmp_path), no_dist=True)
    ranks.run(2, _loads_numbers, str(tmp_path), plain.state_dict())


def _loads_numbers(rank: int, world: int, folder: str, expected: Any) -> None:
    parameters = [nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(5))]
    optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.1)
    optimizer.load_sharded_state_dict(folder)
    optimizer.consolidate_state_dict(to=None)
    _check_state(optimizer.state_dict(), expected, "loaded")


def _mistakes(rank: int, world: int, folder: str) -> None:
    net = _net("adamw")
    optimizer = _make(net, "adamw", world)
    _step(net, optimizer, 0)
    dcp.save({"optim": optimizer.sharded_state_dict()}, checkpoint_id=folder)
    before = [t.clone() for held in optimizer.state.values() for t in held.values()]
    with raises(dcp.CheckpointException, "has nothing named 'optimizer', but optim"):
        optimizer.load_sharded_state_dict(folder)
    with raises(dcp.CheckpointException, "metadata"):
        optimizer.load_sharded_state_dict(folder + "no", "optim")
    smaller = ShardedOptimizer(net[0].parameters(), torch.optim.AdamW)
    with raises(ValueError, "of [1, 10] parameters, this optimizer of [2]"):
        smaller.load_sharded_state_dict(folder, "optim")
    other = nn.Linear(95, 130)  # two ranks cut the matrix
    fewer = ShardedOptimizer(other.parameters(), torch.optim.AdamW)
    _step(other, fewer, 0)
    dcp.save({"optimizer": fewer.sharded_state_dict()}, checkpoint_id=folder + "fewer")
    turned = [nn.Parameter(p.detach().T.clone() if p.ndim == 2 else p) for p in other.parameters()]
    with raises(dcp.CheckpointException, "whose shape is"):
        ShardedOptimizer(turned, torch.optim.AdamW).load_sharded_state_dict(folder + "fewer")
    after = [t for held in optimizer.state.values() for t in held.values()]
    for old, new in zip(before, after, strict=True):
        check_equal(new, old, "state after failed loads")
    optimizer.load_sharded_state_dict(dcp.FileSystemReader(folder), "optim")
    with raises(TypeError, "of a piece of a tensor"):
        state = optimizer.sharded_state_dict()["state"]
        next(v for held in state.values() for v in held.values() if type(v) is TensorPiece).sum()


def _fails_on(rank: int) -> Any:
    def hook(optimizer: Any, state: Any) -> None:
        if dist.get_rank() == rank:
            raise KeyError("of the hook")

    return hook


def _hook_fails(rank: int, world: int, folder: str) -> None:
    net = _net("adamw")
    optimizer = _make(net, "adamw", world)
    _step(net, optimizer, 0)
    dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)
    handle = optimizer.register_load_state_dict_pre_hook(_fails_on(1))
    said = "rank 1 could not load the optimizer's state: KeyError: 'of the hook'"
    with raises(KeyError, "of the hook") if rank == 1 else raises(RuntimeError, said):
        optimizer.load_sharded_state_dict(folder)
    handle.remove()
    optimizer.load_sharded_state_dict(folder)


def test_sharded_checkpoint_hook_that_fails_on_one_rank_raises_on_every_rank(
    ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    ranks.run(2, _hook_fails, str(tmp_path))


def test_sharded_checkpoint_says_what_is_wrong(ranks: RankPool, tmp_path: pathlib.Path) -> None:
    ranks.run(2, _mistakes, str(tmp_path / "c"))


def _grows(rank: int, world: int, folder: str) -> None:
    """A group added later, a group without pieces on one rank, ranks of a subgroup."""
    group = dist.new_group([1, 2])
    results = []
    for part in ("saved", "loaded"):
        net = _net("own")
        optimizer = _make(net, "own", world, group) if rank else None
        plain_net, plain = _plain("own", torch.float32, 0)
        for step in range(4):
            if step == 1:
                for one, of in ((net, optimizer), (plain_net, plain)):
                    extra = nn.Parameter(torch.full((3, 2), 0.5))
                    one.register_parameter("extra", extra)
                    if of is not None:
                        of.add_param_group({"params": [("extra", extra)], "lr": 0.3})
            if part == "loaded" and step == 2 and optimizer is not None:
                optimizer = ShardedOptimizer(
                    [{"params": g["params"]} for g in optimizer.param_groups],
                    OPTIMIZERS["own"][0],
                    process_group=group,
                )
                optimizer.load_sharded_state_dict(folder)
            _step(plain_net, plain, step)
            if optimizer is not None:
                _step(net, optimizer, step)
                _check_as(net, plain_net, f"{part}, step {step}")
            if part == "saved" and step == 1 and optimizer is not None:
                state = {"optimizer": optimizer.sharded_state_dict()}
                dcp.save(state, checkpoint_id=folder, process_group=group)
        results.append(net)
    if rank:
        _check_as(*results, "resumed")


def test_sharded_checkpoint_of_a_subgroup_with_added_parameters(
    ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    ranks.run(3, _grows, str(tmp_path))


def _in_background(rank: int, world: int, folder: str) -> None:
    net = _net("adamw")
    optimizer = _make(net, "adamw", world)
    _step(net, optimizer, 0)
    saved = dcp.async_save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)
    for step in (1, 2):  # meanwhile
        _gradients(net, step)
    saved.result()
    _step(net, optimizer, 1)
    optimizer.load_sharded_state_dict(folder)
    optimizer.consolidate_state_dict(to=None)
    _check_state(optimizer.state_dict(), _plain("adamw", torch.float32, 1)[1].state_dict(), "async")


def _trains_meanwhile(rank: int, world: int, folder: str) -> None:
    """Over sockets, with steps and a save on one group. Oracle: the plain optimizer."""
    with host_channel("0"):
        group = dist.new_group()
        net = _net("adamw")
        optimizer = _make(net, "adamw", world, group)
    for save in range(4):
        state = {"optimizer": optimizer.sharded_state_dict()}
        saved = dcp.async_save(state, checkpoint_id=folder + str(save), process_group=group)
        for step in range(4 * save, 4 * save + 4):
            _step(net, optimizer, step)
            optimizer.clip_grad_norm_(1.0)
        saved.result()
    _check_as(net, _plain("adamw", torch.float32, 16)[0], "after 16 steps")
    optimizer.load_sharded_state_dict(folder + "3")
    optimizer.consolidate_state_dict(to=None)
    expected = _plain("adamw", torch.float32, 12)[1].state_dict()
    _check_state(optimizer.state_dict(), expected, "saved during steps")
    dist.destroy_process_group(group)


def test_sharded_checkpoint_is_saved_in_the_background(
    ranks: RankPool, tmp_path: pathlib.Path
) -> None:
    ranks.run(2, _in_background, str(tmp_path))
    ranks.run(2, _trains_meanwhile, str(tmp_path))
