# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer where ranks share memory: how programs use the memory of parameters, and ranks
that are killed during a step.

More kills: ``python python/tests/test_sharded_memory.py --kills 100``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import io
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_support import RankPool, check, check_equal
from torch import Tensor, nn

from apex.optimizers import ShardedOptimizer

pytestmark = pytest.mark.processes

STEPS = 5


def _model(width: int = 3000) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))


def _backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    x = torch.sin(torch.arange(40.0).view(5, 8) * (step + 1))
    model(x).square().mean().backward()


# --- how programs use the memory of parameters ---

# Each is called before the optimizer is constructed, with step -1, and before each step. What it
# returns is held.


def _nothing(model: nn.Module, step: int) -> Any:
    """The usual case: parameters move into shared memory."""


def _state_dict(model: nn.Module, step: int) -> Any:
    """Views that refer to the storages: the parameters stay where they are."""
    return model.state_dict() if step in (-1, 2) else None


def _one_buffer(model: nn.Module, step: int) -> Any:
    """All parameters are views of one tensor."""
    if step != -1:
        return None
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    begin = 0
    for p in parameters:
        p.data = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    return flat


def _replaced(model: nn.Module, step: int) -> Any:
    if step == 2:
        for p in list(model.parameters())[:2]:
            p.data = p.data * 2
    return None


def _swapped(model: nn.Module, step: int) -> Any:
    """An average replaces the parameters for an evaluation, and is replaced before the step."""
    held = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = torch.zeros_like(p.data)
    model(torch.ones(2, 8))
    for p, old in zip(model.parameters(), held, strict=True):
        p.data = old
    return held if step == 1 else None


def _clipped(model: nn.Module, step: int) -> Any:
    for p in model.parameters():
        p.data.clamp_(-0.3, 0.3)


def _scaled(model: nn.Module, step: int) -> Any:
    """Every rank changes its own parameters: a change of memory that ranks had in common would be
    made several times."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.25)


def _loaded(model: nn.Module, step: int) -> Any:
    if step == 2:
        model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
    if step == 3:
        model.load_state_dict({k: v * 3 for k, v in model.state_dict().items()}, assign=True)


def _numpy(model: nn.Module, step: int) -> Any:
    """An array on the memory of a parameter sees its steps."""
    first = next(iter(model.parameters()))
    if step == -1:
        first.array = first.detach().numpy()  # type: ignore[attr-defined]
    check_equal(torch.from_numpy(first.array), first.detach(), "array")  # type: ignore[attr-defined]


def _saved(model: nn.Module, step: int) -> Any:
    """A file holds the parameters only, not the memory around them."""
    file = io.BytesIO()
    torch.save(model, file)
    bytes_of_all = sum(p.numel() * p.element_size() for p in model.parameters())
    check(file.tell() < bytes_of_all + 20_000, f"{file.tell()} bytes for {bytes_of_all}")
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.data.zero_()


def _forked(model: nn.Module, step: int) -> Any:
    """A child process has the parameters of the moment in which it was forked, which steps of its
    parent do not change. What it writes changes nothing in its parent."""
    if step != 2:
        return None
    before = [p.detach().clone() for p in model.parameters()]
    ready, done = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os.read(ready[0], 1)  # the parent has stepped
        same = all(map(torch.equal, (p.detach() for p in model.parameters()), before))
        for p in model.parameters():
            p.data.fill_(9.0)
        os.write(done[1], b"y" if same else b"n")
        os._exit(0)
    return _Child(child, ready[1], done[0])


class _Child:
    def __init__(self, pid: int, ready: int, done: int) -> None:
        self.pid, self.ready, self.done = pid, ready, done

    def look(self) -> None:
        os.write(self.ready, b"x")
        check(os.read(self.done, 1) == b"y", "the child has the parameters of a later step")
        os.waitpid(self.pid, 0)


def _passed_on(model: nn.Module, step: int) -> Any:
    """torch moves the memory into a file of its own."""
    if step == 1:
        model.share_memory()


PROGRAMS: list[Callable[[nn.Module, int], Any]] = [
    _nothing,
    _state_dict,
    _one_buffer,
    _replaced,
    _swapped,
    _clipped,
    _scaled,
    _loaded,
    _numpy,
    _saved,
    _forked,
    _passed_on,
]


def _trained(
    model: nn.Module, optimizer_of: Callable[[Any], Any], program: Callable[[nn.Module, int], Any]
) -> list[Tensor]:
    held = [program(model, -1)]
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        _backward(model, step)
        held.append(program(model, step))
        optimizer.step()
        if isinstance(held[-1], _Child):
            held[-1].look()
    return [p.detach().clone() for p in model.parameters()]


def _run_program(rank: int, world: int, number: int, whole: bool) -> None:
    program = PROGRAMS[number]
    plain = _trained(_model(), lambda p: torch.optim.AdamW(p, lr=0.1), program)
    model = _model()
    if rank > 0:  # rank 0's values are broadcast
        for p in model.parameters():
            p.data.add_(rank)
    sharded = _trained(
        model,
        lambda p: ShardedOptimizer(p, torch.optim.AdamW, lr=0.1, whole_parameters=whole),
        program,
    )
    for mine, of_plain in zip(sharded, plain, strict=True):
        check_equal(mine, of_plain, f"parameters with {program.__name__}, whole={whole}")
    # The optimizer is gone, and the parameters still have their memory.
    gc.collect()
    for p, value in zip(model.parameters(), sharded, strict=True):
        check_equal(p.detach(), value, "parameters after the optimizer")
        p.data.add_(1)


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=lambda i: PROGRAMS[i].__name__)
def test_sharded_optimizer_whatever_a_program_does_to_memory_steps_as_the_plain_one(
    ranks: RankPool, number: int
) -> None:
    """Reference: the plain optimizer in one process, bit for bit."""
    for world, whole in ((2, False), (3, True)):
        ranks.run(world, _run_program, number, whole)


def _moves(rank: int, world: int) -> None:
    """Parameters move into shared memory if nothing else refers to their storages."""
    model, held = _model(), _model()
    state = held.state_dict()
    for one, moves in ((model, True), (held, False)):
        before = [p.data_ptr() for p in one.parameters()]
        ShardedOptimizer(one.parameters(), torch.optim.SGD, lr=0.1)
        after = [p.data_ptr() for p in one.parameters()]
        check(all(a != b for a, b in zip(after, before, strict=True)) == moves, "memory moved")
        check(moves or after == before, "memory moved although something refers to it")
    del state


def test_sharded_optimizer_moves_parameters_that_are_not_shared(ranks: RankPool) -> None:
    ranks.run(2, _moves)


def _workers(rank: int, world: int) -> None:
    """Processes forked one after another have one copy of the parameters in common."""
    model = nn.Linear(3000, 3000)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    resident = pathlib.Path("/proc/self/statm")
    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        ready = os.pipe()
        sizes, children = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                child = os.fork()
                if child == 0:
                    os.read(ready[0], 1)
                    os._exit(0)
                children.append(child)
                sizes.append(int(resident.read_text().split()[1]) * 4096)
        check(sizes[-1] - sizes[0] < 20e6, f"resident after each fork: {sizes}")
        os.write(ready[1], b"xxxx")
        for child in children:
            os.waitpid(child, 0)


def test_sharded_optimizer_forked_workers_have_one_copy(ranks: RankPool) -> None:
    ranks.run(2, _workers)


def _again(rank: int, world: int) -> None:
    """Optimizers follow each other on the same parameters, also at the same time."""
    model, twin = _model(), _model()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    kept: list[Any] = []
    for turn in range(4):
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        if turn == 1:
            kept.append(optimizer)  # its tensors refer to the storages
        for step in range(2):
            _backward(model, step)
            _backward(twin, step)
            optimizer.step()
            plain.step()
        del optimizer
        for mine, of_plain in zip(model.parameters(), twin.parameters(), strict=True):
            check_equal(mine.detach(), of_plain.detach(), f"parameters in turn {turn}")


def test_sharded_optimizer_constructed_again_steps_as_the_plain_one(ranks: RankPool) -> None:
    ranks.run(2, _again)


# --- killed ranks ---


def _digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def _dies(rank: int, folder: str, world: int, moment: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world
    )
    model, twin = _model(60_000), _model(60_000)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    before = after = ""
    if rank == 1:
        threading.Timer(moment, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    error = None
    try:
        for step in range(100_000):
            _backward(twin, step)
            plain.step()
            before, after = after, _digest([p.detach() for p in twin.parameters()])
            if step == 0:
                before = _digest([p.detach() for p in model.parameters()])
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                p.grad = q.grad
            optimizer.step()
    except RuntimeError as raised:
        error = str(raised)
        now = _digest([p.detach() for p in model.parameters()])
        for p in model.parameters():
            p.data.zero_()  # of no consequence to ranks that are later
    which = "before" if now == before else "after" if now == after else "a mix"
    pathlib.Path(folder, f"rank{rank}").write_text(f"{which}\n{step}\n{error}")
    os._exit(0)


def _kill(folder: pathlib.Path, world: int, moment: float) -> str:
    """Returns whether the survivors are before or after a step."""
    context = mp.get_context("spawn")
    started = [
        context.Process(target=_dies, args=(r, str(folder), world, moment)) for r in range(world)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(90)
    assert started[1].exitcode == -signal.SIGKILL
    results = [(folder / f"rank{r}").read_text().split("\n", 2) for r in range(world) if r != 1]
    for which, step, error in results:
        assert which in ("before", "after"), results
        # Some ranks may have begun the next step, whose parameters before it are those after this.
        assert int(step) + (which == "after") == int(results[0][1]) + (results[0][0] == "after"), (
            results
        )
        assert "rank 1" in error, results
    return results[0][0]


@pytest.mark.parametrize(("world", "moment"), [(2, 0.05), (3, 0.4)])
def test_sharded_optimizer_survivors_of_a_killed_rank_have_one_whole_step(
    tmp_path: pathlib.Path, world: int, moment: float
) -> None:
    """References: the plain optimizer before and after the step, and the other survivors."""
    _kill(tmp_path, world, moment)


def _leaves_early(rank: int, folder: str, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=3)
    model = _model()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for step in range(2):
        _backward(model, step)
        optimizer.step()
    _backward(model, 2)
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> None:
        raise ArithmeticError("no batch")

    if rank == 1 and how == "killed":
        for p in model.parameters():
            p.data.fill_(7.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(0.5)  # the others have failed by then
    try:
        optimizer.step(closure if rank == 1 else None)
        raised = ""
    except (RuntimeError, ArithmeticError) as error:
        raised = str(error)
    same = all(map(torch.equal, (p.detach() for p in model.parameters()), before))
    for p in model.parameters():
        p.data.fill_(7.0)
    pathlib.Path(folder, f"rank{rank}").write_text(f"{same} {raised}")
    time.sleep(1)
    os._exit(0)


@pytest.mark.parametrize("how", ["closure", "killed"])
def test_sharded_optimizer_rank_that_fails_before_its_step_leaves_the_others_before_it(
    tmp_path: pathlib.Path, how: str
) -> None:
    """A rank that has not begun the step may have other values where the others' pieces are."""
    context = mp.get_context("spawn")
    args = [(rank, str(tmp_path), how) for rank in range(3)]
    started = [context.Process(target=_leaves_early, args=one) for one in args]
    for process in started:
        process.start()
    for process in started:
        process.join(90)
    for rank in (0, 2) if how == "killed" else (0, 1, 2):
        same, _, error = (tmp_path / f"rank{rank}").read_text().partition(" ")
        assert same == "True", (rank, error)
        assert ("no batch" if how == "closure" else "rank 1") in error, (rank, error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    found = {"before": 0, "after": 0}
    for _ in range(args.kills):
        with tempfile.TemporaryDirectory() as folder:
            found[_kill(pathlib.Path(folder), draw.choice([2, 3]), draw.uniform(0.05, 0.6))] += 1
    print(f"{args.kills} kills, whose survivors had the parameters of: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
