# SPDX-License-Identifier: BSD-3-Clause
"""replica_check_every and on_divergence detect ranks that do not hold the same state.

More flipped bits and clean steps:
``python python/tests/test_replica_check.py --flips 300 --clean 20000``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import logging
import pickle
import random
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from amp_support import fresh_amp  # noqa: F401
from ddp_support import RankPool, check, check_equal, check_same_on_all_ranks, forget_amp, raises
from torch import nn

from apex import amp
from apex.parallel import DistributedDataParallel, SyncBatchNorm

pytestmark = pytest.mark.processes

EVERY = 4
FLIPS = 40


class Net(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.plain = nn.BatchNorm1d(width)  # its buffers may differ by rank
        self.synchronized = SyncBatchNorm(width)
        self.register_buffer("table", torch.arange(33, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = self.synchronized(self.plain(self.first(x.to(self.first.weight.dtype))))
        return self.last(y) * self.table[1].to(y.dtype)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def messages() -> Any:
    handler = Messages()
    logger = logging.getLogger("apex.parallel.watch")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def flip(tensor: torch.Tensor, pick: random.Random, high: bool) -> None:
    """Flip one bit of one element, invisible to autograd."""
    data = tensor.data  # writes to it do not change the tensor's version
    memory = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
    at = pick.randrange(memory.numel())
    if high:  # a bit that the next average does not round off
        at = at // 4 * 4 + 3
    memory[at] = int(memory[at]) ^ (1 << pick.randrange(6 if high else 8))


def train(ddp: nn.Module, optimizer: Any, rank: int, step: int, amp_level: bool) -> None:
    torch.manual_seed(100 * step + rank)
    optimizer.zero_grad()
    loss = ddp(torch.randn(8, 6)).float().square().mean()
    if amp_level:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    else:
        loss.backward()
    optimizer.step()


def _flips(rank: int, world: int, seeds: list[int]) -> None:
    for seed in seeds:
        try:
            _flip(rank, world, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {world} ranks: {error}") from error
        finally:
            forget_amp()


def _flip(rank: int, world: int, seed: int) -> None:
    pick = random.Random(seed)
    victim = pick.randrange(world)
    amp_level = pick.random() < 0.3
    torch.manual_seed(seed + 10 * rank)
    net = Net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
    if amp_level:
        net, optimizer = amp.initialize(net, optimizer, opt_level="O2", verbosity=0)
    ddp = DistributedDataParallel(
        net,
        replica_check_every=EVERY,
        on_divergence="raise",
        gradient_as_bucket_view=pick.random() < 0.5,
        broadcast_buffers=False,
    )
    step = 0
    for step in range(2 * EVERY + 3):  # the first round determines which buffers differ
        train(ddp, optimizer, rank, step, amp_level)
    kinds = ["weight", "buffer", *(["master"] if amp_level else [])]
    kind = pick.choice(kinds)
    if kind == "weight":
        # If the parameter has a master weight, the next step would undo the flip.
        named = {n: p for n, p in net.named_parameters() if p.dtype == torch.float32}
        expected = pick.choice(sorted(named))
        tensor, expected = named[expected], f"parameter '{expected}'"
    elif kind == "master":
        masters = list(amp.master_params(optimizer))
        low = [name for name, p in net.named_parameters() if p.dtype == torch.float16]
        index = pick.randrange(len(low))
        tensor = [m for m in masters if m.dtype == torch.float32][index]
        expected = "master weight of "
    else:
        expected = pick.choice(["synchronized.running_mean", "synchronized.running_var"])
        tensor, expected = dict(net.named_buffers())[expected], f"buffer '{expected}'"
    if rank == victim:
        flip(tensor, pick, high=kind == "buffer")
    found = None
    for later in range(step + 1, step + 2 + EVERY):
        try:
            train(ddp, optimizer, rank, later, amp_level)
        except RuntimeError as error:
            found = str(error)
            break
    check(found is not None, f"a bit flipped in a {kind} was not found")
    assert found is not None
    who = f"rank {victim} holds a different state than the other ranks: "
    if world == 2:
        who = "(rank 1 differs from rank 0, and no state has a majority): "
    check(who in found, f"{who!r} in: {found}")
    # A weight's flipped bit may have changed its master or its buffer, or the reverse.
    if kind != "master" and not amp_level:
        check(f": {expected} differs" in found, f"{expected} in: {found}")


def run_flips(pool: RankPool, first: int, count: int) -> None:
    for world in (2, 3, 4):
        seeds = [seed for seed in range(first, first + count) if 2 + seed % 3 == world]
        for begin in range(0, len(seeds), 20):
            pool.run(world, _flips, seeds[begin : begin + 20], timeout_s=240)


def test_replica_check_finds_and_names_flipped_bits(ranks: RankPool) -> None:
    run_flips(ranks, 0, FLIPS)


def _clean(rank: int, world: int, steps: int) -> None:
    torch.manual_seed(rank)
    with messages() as texts:
        for options in (
            {"replica_check_every": EVERY},
            {},  # the default
            {"replica_check_every": 1, "broadcast_buffers": True},
            {"replica_check_every": 3, "gradient_average": "weighted"},
        ):
            net = Net()
            ddp = DistributedDataParallel(net, **options)  # type: ignore[arg-type]
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
            for step in range(steps):
                optimizer.zero_grad()
                context = ddp.weight(1 + rank) if "gradient_average" in options else None
                with context or contextlib.nullcontext():
                    ddp(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                if step == steps // 2:  # as a script that resumes
                    net.load_state_dict(copy.deepcopy(net.state_dict()))
    check_equal(texts, [], "messages")


def test_replica_check_says_nothing_of_clean_steps(ranks: RankPool) -> None:
    ranks.run(3, _clean, 120)


def _other_weights(ddp: DistributedDataParallel, rank: int, who: int) -> None:
    if rank == who:
        with torch.no_grad():
            ddp.module.first.weight.add_(1)
            ddp.module.last.bias.add_(1)


def _actions(rank: int, world: int) -> None:
    optimizer_of = lambda ddp: torch.optim.SGD(ddp.parameters(), lr=0.01)  # noqa: E731
    text = "rank 2 holds a different state than the other ranks: parameter 'first.weight' differs"

    # "warn", the default: after 1, 2, 4, ... differences, by rank 0 and in its logger.
    ddp = DistributedDataParallel(Net(), replica_check_every=1)
    optimizer = optimizer_of(ddp)
    with messages() as texts:
        for step in range(3):
            train(ddp, optimizer, rank, step, False)
        _other_weights(ddp, rank, 2)
        for step in range(9):
            train(ddp, optimizer, rank, step, False)
    if rank == 0:
        check_equal(len(texts), 4, "messages")
        check(text in texts[0] and "and so do 1 more of " in texts[0], texts[0])
    else:
        check_equal(texts, [], "messages of another rank")

    # "raise": on every rank, in the same step, and again until it is fixed.
    ddp = DistributedDataParallel(Net(), replica_check_every=1, on_divergence="raise")
    optimizer = optimizer_of(ddp)
    for step in range(3):
        train(ddp, optimizer, rank, step, False)
    kept = copy.deepcopy(ddp.state_dict())
    _other_weights(ddp, rank, 2)
    for step in range(2):
        with raises(RuntimeError, f"rank {rank}: {text}", "backward number"):
            train(ddp, optimizer, rank, step, False)
    ddp.load_state_dict(kept)
    train(ddp, optimizer, rank, 5, False)

    # "resync": the step is skipped, and all ranks get the state of the majority.
    ddp = DistributedDataParallel(Net(), replica_check_every=1, on_divergence="resync")
    optimizer = optimizer_of(ddp)
    with messages() as texts:
        for step in range(3):
            train(ddp, optimizer, rank, step, False)
        expected = [p.detach().clone() for p in ddp.parameters()]
        _other_weights(ddp, rank, 0)  # not rank 0's state, which init_sync would broadcast
        train(ddp, optimizer, rank, 3, False)
        check(ddp.step_skipped, "the step was not skipped")
        for p, before in zip(ddp.parameters(), expected, strict=True):
            check(torch.equal(p, before), "not the state of most ranks")
        for step in range(4):
            train(ddp, optimizer, rank, step, False)
    check_equal(len(texts), 1 if rank == 0 else 0, "messages")
    for said in texts:
        check("s state was copied to all ranks, and this step is skipped" in said, said)
    check_same_on_all_ranks(list(ddp.parameters()), "parameters")


def test_replica_check_warns_raises_and_takes_over(ranks: RankPool) -> None:
    ranks.run(3, _actions)


def _resync_in_vain(rank: int, world: int) -> None:
    """Hazard: one rank's momentum differs, so that all steps would be skipped indefinitely."""
    ddp = DistributedDataParallel(Net(), replica_check_every=1, on_divergence="resync")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    for step in range(4):
        train(ddp, optimizer, rank, step, False)
    if rank == 1:
        for state in optimizer.state.values():
            state["momentum_buffer"].add_(1)
    with raises(RuntimeError, f"rank {rank}: ", "Copies of the majority's state have not"):
        for step in range(12):
            train(ddp, optimizer, rank, step, False)


def test_replica_check_that_takes_over_in_vain_raises(ranks: RankPool) -> None:
    ranks.run(3, _resync_in_vain)


def _resync_masters(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    net, optimizer = Net(), None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O2", verbosity=0)
    ddp = DistributedDataParallel(net, replica_check_every=1, on_divergence="resync")
    for step in range(4):
        train(ddp, optimizer, rank, step, True)
    if rank == 1:
        with torch.no_grad():
            next(iter(amp.master_params(optimizer))).mul_(1.25)
            optimizer._master_params_to_model_params()
    for step in range(6):
        train(ddp, optimizer, rank, step, True)
    check_same_on_all_ranks(list(net.parameters()), "parameters")
    check_same_on_all_ranks(list(amp.master_params(optimizer)), "master weights")
    forget_amp()


@pytest.mark.usefixtures("fresh_amp")
def test_replica_check_takes_over_master_weights(ranks: RankPool) -> None:
    ranks.run(3, _resync_masters)


def _hooks(rank: int, world: int) -> None:
    """The module's hook goes with the wrapper, and a saved module needs nothing of this package."""
    net = Net()
    ddp = DistributedDataParallel(net)
    check_equal(len(net._load_state_dict_pre_hooks), 1, "hooks")
    saved = io.BytesIO()
    torch.save(net._load_state_dict_pre_hooks, saved)
    check(b"apex" not in saved.getvalue(), "the saved hook refers to the package")
    copied = copy.deepcopy(net)
    copied.load_state_dict(net.state_dict())
    again = copy.deepcopy(ddp)
    train(again, torch.optim.SGD(again.parameters(), lr=0.1), rank, 0, False)
    check_equal(len(again.module._load_state_dict_pre_hooks), 2, "hooks, of which one is a copy")
    del ddp
    gc.collect()
    check_equal(len(net._load_state_dict_pre_hooks), 0, "hooks after the wrapper")


def test_hook_of_the_module_goes_with_the_wrapper(ranks: RankPool) -> None:
    ranks.run(2, _hooks)


def _misuse(rank: int, world: int) -> None:
    """Common mistakes that raise no error."""
    for case in ("local step", "other checkpoint", "local optimizer"):
        ddp = DistributedDataParallel(Net(), replica_check_every=2, on_divergence="raise")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(5):
            train(ddp, optimizer, rank, step, False)
        if case == "local step":
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.randn(4, 6) + rank).square().mean().backward()
            optimizer.step()
        elif case == "other checkpoint":
            ddp.module.load_state_dict({k: v + rank for k, v in ddp.module.state_dict().items()})
        else:
            for group in optimizer.param_groups:
                group["lr"] *= 1 + rank
        with raises(RuntimeError, "hold"):
            for step in range(4):
                train(ddp, optimizer, rank, step, False)


def test_replica_check_finds_silent_misuse(ranks: RankPool) -> None:
    ranks.run(3, _misuse)


def _load(rank: int, world: int) -> None:
    """State that differs after load_state_dict() is found in the next backward, not in 100."""
    later = {"gradient_as_bucket_view": True}
    cases = ((0, {}, False), (3, {}, False), (3, later, False), (3, {}, True))
    for trained, options, inner in cases:
        for who in ("all ranks", "rank 1"):
            torch.manual_seed(7)
            ddp = DistributedDataParallel(Net(), on_divergence="raise", **options)  # type: ignore[arg-type]
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            for step in range(trained):
                train(ddp, optimizer, rank, step, False)
            state = copy.deepcopy(ddp.state_dict())
            other = dict(state)
            other["module.last.bias"] = state["module.last.bias"] + rank  # in the hundredth part
            if who == "rank 1" and rank != 1:
                other = state
            if who == "all ranks" or rank == 1:
                if inner:
                    ddp.module.load_state_dict(
                        {name.removeprefix("module."): value for name, value in other.items()}
                    )
                else:
                    ddp.load_state_dict(other)
            texts = ["hold the same state", f"backward number {trained + 1})"]
            if who == "rank 1":
                texts[0] = "rank 1 holds a different state"
                if trained == 0:  # the other ranks have never updated anything
                    texts = ["rank 1 updated the parameters since"]
            with raises(RuntimeError, *texts):
                train(ddp, optimizer, rank, 9, False)
            if who == "all ranks":
                ddp.load_state_dict(state)
            elif rank == 1:  # the same as the others have: they have loaded nothing
                ddp.load_state_dict(state)
            for step in range(4):
                train(ddp, optimizer, rank, step, False)
            check_same_on_all_ranks(list(ddp.parameters()), "parameters")
    # What ranks hold on purpose is not compared.
    for quiet in ({"replica_check_every": 0}, {"init_sync": False}):
        ddp = DistributedDataParallel(Net(), on_divergence="raise", **quiet)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, rank, 0, False)
        ddp.load_state_dict({name: value + rank for name, value in ddp.state_dict().items()})
        train(ddp, optimizer, rank, 1, False)
    # A failed backward leaves the comparison to the next one.
    ddp = DistributedDataParallel(nn.Linear(6, 3), on_divergence="raise", on_failure="skip")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    train(ddp, optimizer, rank, 0, False)
    ddp.load_state_dict({name: value + rank for name, value in ddp.state_dict().items()})
    loss = ddp(torch.randn(4, 6)).square().mean()
    if rank == 1:
        handle = ddp.module.weight.register_hook(lambda grad: 1 / 0)
        with raises(ZeroDivisionError, "division"):
            loss.backward()
        handle.remove()
    else:
        loss.backward()
        check(ddp.step_skipped, "the failed step was not skipped")
    with raises(RuntimeError, "hold the same state"):
        train(ddp, optimizer, rank, 2, False)


def _load_copies(rank: int, world: int) -> None:
    """Hazard: a reducer that need not broadcast parameters was taken for one whose ranks differ."""
    for how in ("copy", "pickle", "static graph"):
        for when in ("before", "after"):
            torch.manual_seed(7)
            ddp = DistributedDataParallel(Net(), on_divergence="raise")
            if how == "static graph":  # to be called before the first backward
                ddp._set_static_graph()
            train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), rank, 0, False)
            if how == "copy":
                ddp = copy.deepcopy(ddp)
            elif how == "pickle":
                ddp = pickle.loads(pickle.dumps(ddp))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            if when == "after":
                train(ddp, optimizer, rank, 1, False)
            ddp.load_state_dict({name: value + rank for name, value in ddp.state_dict().items()})
            try:
                train(ddp, optimizer, rank, 2, False)
            except RuntimeError as error:
                check("the ranks do not hold the same state" in str(error), str(error))
            else:
                check(False, f"{how}: what was loaded {when} its first step is not compared")


def test_replica_check_compares_copies_and_static_graphs(ranks: RankPool) -> None:
    ranks.run(3, _load_copies)


def _load_and_skip(rank: int, world: int) -> None:
    """Hazard: a step that compares nothing consumes the comparison that a skipped one left."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Net(), on_divergence="raise")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    train(ddp, optimizer, rank, 0, False)
    ddp.load_state_dict({name: value + rank for name, value in ddp.state_dict().items()})
    ddp.skip_step()
    train(ddp, optimizer, rank, 1, False)
    # As SAM does: parameters are updated after a backward that was not synchronized.
    with ddp.no_sync():
        ddp(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    train(ddp, optimizer, rank, 2, False)
    with raises(RuntimeError, "the ranks do not hold the same state"):
        train(ddp, optimizer, rank, 3, False)


def test_replica_check_after_a_skipped_step_compares_what_was_loaded(ranks: RankPool) -> None:
    ranks.run(3, _load_and_skip)


def test_replica_check_compares_what_was_loaded_at_once(ranks: RankPool) -> None:
    ranks.run(3, _load)


def _options(rank: int, world: int) -> None:
    for wrong in (-1, 1.5, True, "often"):
        with raises(ValueError, "replica_check_every must be a number of steps"):
            DistributedDataParallel(Net(), replica_check_every=wrong)  # type: ignore[arg-type]
    with raises(ValueError, "on_divergence must be 'raise', 'warn' or 'resync', got 'ignore'"):
        DistributedDataParallel(Net(), on_divergence="ignore")
    with raises(RuntimeError, "replica_check_every"):
        DistributedDataParallel(Net(), replica_check_every=1 + rank)
    # Nothing is compared: disabled, deliberately different, or not requested where ranks may
    # differ.
    quiet: list[dict[str, Any]] = [
        {"replica_check_every": 0},
        {"init_sync": False},
        {"check_reduction": False},
    ]
    with messages() as texts:
        for options in quiet:
            ddp = DistributedDataParallel(Net(), **options)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            for step in range(105):
                train(ddp, optimizer, rank, step, False)
                if step == 1:
                    _other_weights(ddp, rank, 1)
    check_equal(texts, [], "messages")
    # By default within 100 steps.
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with messages() as texts:
        for step in range(103):
            train(ddp, optimizer, rank, step, False)
            if step == 1:
                _other_weights(ddp, rank, 1)
    check_equal(len(texts) > 0, rank == 0, "messages by default")


def test_replica_check_options(ranks: RankPool) -> None:
    ranks.run(2, _options)


def _buffers_differ(rank: int, world: int) -> None:
    """Ranks have different lists of buffers, so only parameters are compared."""
    net = Net()
    if rank == 1:
        net.register_buffer("own", torch.zeros(5))
    ddp = DistributedDataParallel(net, replica_check_every=2, on_divergence="raise")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(8):
        train(ddp, optimizer, rank, step, False)
    _other_weights(ddp, rank, 1)
    with raises(RuntimeError, "parameter 'first.weight' differs"):
        for step in range(3):
            train(ddp, optimizer, rank, step, False)


def test_replica_check_with_other_buffers_on_some_ranks(ranks: RankPool) -> None:
    ranks.run(2, _buffers_differ)


class Own(Net):
    """Rank-specific state that a correct program may have."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.zeros(7), requires_grad=False)
        self.register_buffer("queue", torch.zeros(7))
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.register_buffer("running", torch.zeros(24))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.rank = dist.get_rank()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps > 8:  # only after the first rounds
            self.queue[self.steps % 7] = float(self.rank)
            self.bank[self.steps % 7] = float(self.rank)
            self.running = self.running * 0.9 + self.rank
            self.hidden.data = torch.full((3,), float(self.rank))
            self.table.data.add_(self.rank)
            # A kernel that writes the buffers without a version change.
            x = nn.functional.batch_norm(x, self.mean, self.var, training=True)
        return super().forward(x)


def _own_state(rank: int, world: int) -> None:
    """Hazard: a warning about a correct program."""
    torch.manual_seed(rank)
    with messages() as texts:
        net = Own().eval()  # plain batch norm is equal until it trains
        ddp = DistributedDataParallel(net, replica_check_every=EVERY)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(30):
            if step == 12:
                net.train()
            train(ddp, optimizer, rank, step, False)
        # SAM: moves by this rank's gradient, and back after the synchronizing backward.
        ddp = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(104):
            torch.manual_seed(100 * step + rank)
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.randn(8, 6)).square().mean().backward()
            moved = [p.grad.clone() for p in ddp.parameters()]
            with torch.no_grad():
                for p, m in zip(ddp.parameters(), moved, strict=True):
                    p.add_(m)
            optimizer.zero_grad()
            ddp(torch.randn(8, 6)).square().mean().backward()
            with torch.no_grad():
                for p, m in zip(ddp.parameters(), moved, strict=True):
                    p.sub_(m)
            optimizer.step()
    check_equal(texts, [], "messages")


def test_replica_check_says_nothing_of_what_ranks_have_of_their_own(ranks: RankPool) -> None:
    ranks.run(2, _own_state)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--clean", type=int, default=20000)
    args = parser.parse_args()
    logging.getLogger("apex.parallel.watch").addHandler(logging.StreamHandler(io.StringIO()))
    with RankPool() as pool:
        run_flips(pool, args.first, args.flips)
        print(f"{args.flips} flipped bits: all found and named")
        for _ in range(args.clean // 4000):
            pool.run(3, _clean, 1000, timeout_s=600)
        print(f"{args.clean} clean steps: no report")
    return 0


if __name__ == "__main__":
    sys.exit(main())
