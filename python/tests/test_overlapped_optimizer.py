# SPDX-License-Identifier: BSD-3-Clause
"""OverlappedOptimizer: updates in the next forward are bitwise equal to immediate updates."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_support import DEVICE, RankPool, check, check_equal, check_same_on_all_ranks, raises
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.parallel import DistributedDataParallel, OverlappedOptimizer
from apex.parallel.LARC import LARC

pytestmark = pytest.mark.processes

STEPS = 9  # the plan is recorded in the first, ordered after the third; later ones are deferred


class Net(nn.Module):
    """Several buckets of unequal size, a norm, a direct parameter, and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.middle = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(40))
        self.last = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        for layer in self.middle:
            h = torch.tanh(layer(h)) + 0.5 * h
        h = torch.tanh(self.middle[0](h))
        return self.last(h * self.scale)


def make(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), message_size=150, **options)


def batch(rank: int, step: int) -> Tensor:
    return torch.sin(torch.arange(48, dtype=torch.float32).view(8, 6) * (step + 1) + 3 * rank)


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam, one tensor at a time": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
}


def train(
    ddp: nn.Module, optimizer: Any, rank: int, *, clear_first: bool, steps: int = STEPS
) -> list[Any]:
    """The losses of a typical training loop with a scheduler."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    losses = []
    for step in range(steps):
        if clear_first:
            optimizer.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if not clear_first:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.item())
    return losses


def check_either_way(
    make_ddp: Callable[[], Any], run: Callable[[Any, Any], None], make_optimizer: Make
) -> Any:
    """``run(ddp, optimizer)`` gives the same parameters with an OverlappedOptimizer as without."""
    results = []
    for overlap in (False, True):
        torch.manual_seed(0)
        ddp = make_ddp()
        optimizer: Any = make_optimizer(ddp.parameters())
        if overlap:
            optimizer = OverlappedOptimizer(optimizer, ddp)
        run(ddp, optimizer)
        if overlap:
            optimizer.synchronize()
        results.append([p.detach().clone() for p in ddp.parameters()])
    check(all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "parameters differ")
    return ddp


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _same_as_at_once(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    for clear_first in (True, False):
        plain = make(**options)
        if world > 2:
            # The summation order of three values depends on their position in the bucket.
            plan = [
                [n for n, _ in reversed(list(plain.module.named_parameters()))][i::4]
                for i in range(4)
            ]
            plain.load_bucket_plan(plan)
        expected = train(plain, OPTIMIZERS[name](plain.parameters()), rank, clear_first=clear_first)
        ddp = make(**options)
        if world > 2:
            ddp.load_bucket_plan(plan)
        optimizer = OverlappedOptimizer(OPTIMIZERS[name](ddp.parameters()), ddp)
        losses = train(ddp, optimizer, rank, clear_first=clear_first)
        check_equal(losses, expected, f"losses, clear_first={clear_first}")
        check(ddp.statistics()["deferred"] >= STEPS - 4, f"hardly deferred: {ddp.statistics()}")
        check(len(ddp.bucket_plan()) > 3, "too few buckets to tell")
        optimizer.synchronize()
        for (n, p), q in zip(ddp.named_parameters(), plain.parameters(), strict=True):
            check(torch.equal(p, q), f"{n} differs, clear_first={clear_first}")
        check_same_on_all_ranks(list(ddp.parameters()), "parameters")


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 3])
def test_losses_and_parameters_are_those_of_the_plain_loop(
    ranks: RankPool, world: int, name: str, options: dict[str, Any]
) -> None:
    ranks.run(world, _same_as_at_once, name, options)


def _updates_in_forward(rank: int, world: int) -> None:
    ddp = make()
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    train(ddp, optimizer, rank, clear_first=True)
    waiting: list[set[str]] = []
    names = {p: n for n, p in ddp.module.named_parameters()}

    def record(*_: Any) -> None:
        waiting.append({names[p] for p in optimizer._in_flight()})

    waiting_after_step = {names[p] for p in optimizer._in_flight()}
    check(waiting_after_step, "no all-reduce is in flight after step()")
    handles = [m.register_forward_hook(record) for m in (ddp.module.first, ddp.module.middle[0])]
    optimizer.zero_grad()
    ddp(batch(rank, 0)).sum().backward()
    for handle in handles:
        handle.remove()
    check(
        "first.weight" not in waiting[0],
        f"first was used while its all-reduce was in flight: {waiting}",
    )
    check(
        "middle.3.weight" in waiting[0], f"the first module waited for a later one, too: {waiting}"
    )
    check(
        "middle.0.weight" in waiting[0] - waiting[1],
        f"middle.0 was used while its all-reduce was in flight: {waiting}",
    )
    check("middle.3.weight" in waiting[1], f"middle.0 waited for a later one, too: {waiting}")


def test_forward_waits_for_each_module_alone(ranks: RankPool) -> None:
    ranks.run(2, _updates_in_forward)


def _reading_the_state(rank: int, world: int) -> None:
    ddp, plain = make(), make()
    optimizer = OverlappedOptimizer(torch.optim.Adam(ddp.parameters(), lr=0.01), ddp)
    at_once = torch.optim.Adam(plain.parameters(), lr=0.01)
    train(ddp, optimizer, rank, clear_first=True)
    train(plain, at_once, rank, clear_first=True)
    check(optimizer._in_flight(), "no all-reduce is in flight")
    check_equal(
        [t.tolist() for t in ddp.module.middle[3].state_dict().values()],
        [t.tolist() for t in plain.module.middle[3].state_dict().values()],
        "state_dict of a part of the model",
    )
    train(ddp, optimizer, rank, clear_first=True, steps=1)
    train(plain, at_once, rank, clear_first=True, steps=1)
    check(optimizer._in_flight(), "no all-reduce is in flight")
    mine, other = optimizer.state_dict(), at_once.state_dict()
    check_equal(len(optimizer._in_flight()), 0, "parameters on their way after state_dict()")
    for i, entry in other["state"].items():
        for key, value in entry.items():
            check(
                torch.equal(torch.as_tensor(mine["state"][i][key]), torch.as_tensor(value)),
                f"{i} {key}",
            )
    ddp.eval()
    plain.eval()
    with torch.no_grad():
        train_batch = batch(rank, 1)
        check(torch.equal(ddp.module(train_batch), plain.module(train_batch)), "evaluation")
    copied = copy.deepcopy(ddp)  # the copy drops the optimizer
    check(copied._engine.hooks.optimizer is None, "the copy has the optimizer of the original")
    pickle.loads(pickle.dumps(ddp)).module(batch(rank, 1))
    with raises(TypeError, "state_dict()"):
        pickle.dumps(optimizer)


def test_state_dicts_and_evaluation_see_the_update(ranks: RankPool) -> None:
    ranks.run(2, _reading_the_state)


def _accumulates(rank: int, world: int) -> None:
    def run(model: Any, optimizer: Any) -> None:
        for step in range(STEPS):
            with model.no_sync():
                model(batch(rank, step)).square().mean().backward()
            model(batch(rank, step + 50)).square().mean().backward()
            if step != 6:  # as a scaler that found an infinity
                optimizer.step()
            optimizer.zero_grad()

    ddp = check_either_way(make, run, plain_sgd)
    check(ddp.statistics()["deferred"] > 0, "nothing was deferred")


def test_accumulation_and_a_skipped_step(ranks: RankPool) -> None:
    ranks.run(2, _accumulates)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        for layer in self.middle:
            h = checkpoint(lambda h, layer=layer: torch.tanh(layer(h)), h, use_reentrant=False)
        return self.last(h * self.scale)


def _checkpointed(rank: int, world: int) -> None:
    ddp = check_either_way(
        lambda: DistributedDataParallel(Checkpointed(), message_size=150),
        lambda ddp, optimizer: train(ddp, optimizer, rank, clear_first=True),
        plain_sgd,
    )
    check(ddp.statistics()["deferred"] > 0, "nothing was deferred")


def test_checkpointed_segments_run_again_in_backward(ranks: RankPool) -> None:
    ranks.run(2, _checkpointed)


def _scaler(rank: int, world: int) -> None:
    def run(ddp: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(ddp(batch(rank, step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    ddp = check_either_way(make, run, plain_sgd)
    check(ddp.statistics()["deferred"] > 0, "nothing was deferred")


def test_torch_grad_scaler_waits(ranks: RankPool) -> None:
    ranks.run(2, _scaler)


def _amp(rank: int, world: int) -> None:
    results = []
    for overlap in (False, True):
        torch.manual_seed(0)
        net = Net()
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = amp.initialize(
            net, optimizer, opt_level="O0", loss_scale=128.0, verbosity=0
        )
        ddp = DistributedDataParallel(net, message_size=150)
        inner = optimizer
        if overlap:
            optimizer = OverlappedOptimizer(optimizer, ddp)
        for step in range(STEPS):
            optimizer.zero_grad()
            with amp.scale_loss(ddp(batch(rank, step)).square().mean(), inner) as loss:
                loss.backward()
            optimizer.step()
        if overlap:
            check(ddp.statistics()["deferred"] > 0, "nothing was deferred")
            optimizer.synchronize()
        results.append([p.detach().clone() for p in ddp.parameters()])
    check(all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "parameters differ")


def test_apex_amp_waits_before_it_unscales(ranks: RankPool) -> None:
    ranks.run(2, _amp)


def _amp_without_scale(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = Net()
    sgd: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    net, inner = amp.initialize(net, sgd, opt_level="O0", verbosity=0)
    ddp = DistributedDataParallel(net, message_size=150)
    optimizer = OverlappedOptimizer(inner, ddp)
    for step in range(STEPS):
        optimizer.zero_grad()
        with amp.scale_loss(ddp(batch(rank, step)).square().mean(), optimizer) as loss:
            loss.backward()
        # Read immediately: the same bits on every rank.
        check_same_on_all_ranks([p.grad for p in net.parameters()], f"gradients of step {step}")
        optimizer.step()


def test_apex_amp_waits_without_a_scale_too(ranks: RankPool) -> None:
    ranks.run(2, _amp_without_scale)


def _inside_larc(rank: int, world: int) -> None:
    def run(ddp: Any, optimizer: Any) -> None:
        optimizer = LARC(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()

    ddp = check_either_way(make, run, OPTIMIZERS["sgd"])
    check_same_on_all_ranks(list(ddp.parameters()), "parameters")

    def closures(ddp: Any, optimizer: Any) -> None:
        optimizer = LARC(optimizer)
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = ddp(batch(rank, step)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    ddp = check_either_way(make, closures, OPTIMIZERS["sgd"])
    check_same_on_all_ranks(list(ddp.parameters()), "parameters, with closures")


def test_larc_around_it_waits_for_the_gradients_it_adapts(ranks: RankPool) -> None:
    ranks.run(2, _inside_larc)


def _around_larc(rank: int, world: int) -> None:
    def run(ddp: Any, optimizer: Any) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()

    ddp = check_either_way(make, run, lambda p: LARC(OPTIMIZERS["sgd"](p)))
    check(ddp.statistics()["deferred"] >= STEPS - 4, f"hardly deferred: {ddp.statistics()}")


def test_larc_inside_it_stays_overlapped(ranks: RankPool) -> None:
    ranks.run(2, _around_larc)


def _discards(rank: int, world: int) -> None:
    for level, larc in itertools.product(("O1", "O2"), (False, True)):
        results = []
        for discarded in (False, True):
            torch.manual_seed(0)
            net = Net()
            net, inner = amp.initialize(
                net,
                torch.optim.SGD(net.parameters(), lr=0.1),
                opt_level=level,
                loss_scale=8.0,
                verbosity=0,
            )
            ddp = DistributedDataParallel(net, message_size=150)
            overlapped = OverlappedOptimizer(inner, ddp)
            optimizer = LARC(overlapped) if larc else overlapped
            for step in range(STEPS):
                if discarded:
                    loss = ddp(batch(rank, 50 + step)).float().square().mean()
                    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled:
                        scaled.backward()
                    with raises(RuntimeError, f"rank {rank}: SGD.step()", "still multiplied"):
                        optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                with amp.scale_loss(ddp(batch(rank, step)).float().square().mean(), optimizer) as s:
                    s.backward()
                optimizer.step()
            overlapped.synchronize()
            results.append([p.detach().clone() for p in net.parameters()])
        check(all(torch.equal(a, b) for a, b in zip(*results, strict=True)), f"{level} differs")
        check_same_on_all_ranks(results[1], level)


def test_apex_amp_delayed_gradients_are_cleared_by_zero_grad(ranks: RankPool) -> None:
    ranks.run(2, _discards)


class Broken(Exception):
    pass


def _break(grad: Tensor) -> None:
    raise Broken


def _bodies_that_raise(rank: int, world: int) -> None:
    kinds = [None, "after backward", "in backward"]
    for level, delayed in itertools.product(("O0", "O1", "O2"), (False, True)):
        results = []
        for kind in kinds:
            torch.manual_seed(0)
            net = Net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            options: Any = {"opt_level": level, "loss_scale": 8.0, "verbosity": 0}
            net, optimizer = amp.initialize(net, optimizer, **options)
            ddp = DistributedDataParallel(net, message_size=150)
            optimizer = OverlappedOptimizer(optimizer, ddp)

            def run(step: int, delay: bool, broken: str | None = None) -> None:
                loss = ddp(batch(rank, step)).float().square().mean()  # noqa: B023
                with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled:  # noqa: B023
                    if broken == "in backward":
                        hook = net.first.weight.register_hook(_break)  # noqa: B023
                    try:
                        scaled.backward()
                    finally:
                        if broken == "in backward":
                            hook.remove()
                    if broken:
                        raise Broken

            for step in range(STEPS):
                optimizer.zero_grad()
                run(step, delayed)
                state = copy.deepcopy(net.norm.state_dict())
                if kind is not None and step > 3:
                    with raises(Broken):
                        run(50 + step, False, kind)
                net.norm.load_state_dict(state)
                run(100 + step, False)
                optimizer.step()
            check(kind == kinds[-1] or ddp.statistics()["deferred"] > 0, "nothing was deferred")
            optimizer.synchronize()
            results.append([p.detach().clone() for p in net.parameters()])
            check_same_on_all_ranks(results[-1], f"{level}, {kind}")
            for one, other in zip(results[0], results[-1], strict=True):
                check(torch.equal(one, other), f"{level}, {delayed}: differs with {kind}")


def test_apex_amp_body_that_raises_waits_before_gradients_are_put_back(ranks: RankPool) -> None:
    ranks.run(2, _bodies_that_raise)


def _attention(rank: int, world: int) -> None:
    """Attention uses the weight of a child, a linear layer, without calling it."""

    def make_ddp() -> DistributedDataParallel:
        layers = [
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
        ]
        return DistributedDataParallel(nn.Sequential(*layers), message_size=1)

    def run(ddp: Any, optimizer: Any) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.sin(torch.arange(320.0).view(4, 5, 16) * (step + rank + 1))
            ddp(x).square().mean().backward()
            optimizer.step()

    ddp = check_either_way(make_ddp, run, plain_sgd)
    check(ddp.statistics()["deferred"] > 0, "nothing was deferred")


def test_parameters_used_by_the_module_above_are_waited_for_there(ranks: RankPool) -> None:
    ranks.run(2, _attention)


# --- silent errors without these checks ---


class Functional(Net):
    """Uses a parameter of the last layer without calling the layer, from some step on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.calls += 1
        if self.calls < 7:
            return self.last(h)
        if self.name == "weight":
            return nn.functional.linear(h, self.last.weight) + 0 * self.last.bias
        return h[:, :3] + self.last.bias + 0 * self.last.weight.sum()


def _used_functionally(rank: int, world: int, name: str, fragments: list[str]) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Functional(name), message_size=1, static_graph=True)
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    with raises(RuntimeError, *fragments):
        train(ddp, optimizer, rank, clear_first=True)
    # It works with the remedy of the message.
    for step in range(STEPS):
        optimizer.synchronize()
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    check_same_on_all_ranks(list(ddp.parameters()), "parameters")


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("bias", ["'last.", "before its last update was complete", "synchronize()"]),
        # torch's error: backward needs its old value
        ("weight", ["modified by an inplace operation"]),
    ],
)
def test_parameter_used_past_its_module_is_an_error(
    ranks: RankPool, name: str, fragments: list[str]
) -> None:
    ranks.run(2, _used_functionally, name, fragments)


def _cleared_behind_its_back(rank: int, world: int) -> None:
    ddp = make()
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    train(ddp, optimizer, rank, clear_first=True)
    ddp.module.zero_grad()
    with raises(RuntimeError, "OverlappedOptimizer.zero_grad()"):
        ddp(batch(rank, 0))


def test_gradients_cleared_by_others_are_an_error(ranks: RankPool) -> None:
    ranks.run(2, _cleared_behind_its_back)


class CountsInGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def _refuses(rank: int, world: int) -> None:
    ddp = make()
    with raises(TypeError, "DistributedDataParallel"):
        OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp.module)
    with raises(TypeError, "optimizer"):
        OverlappedOptimizer(ddp, ddp)
    with raises(ValueError, "LBFGS"):
        OverlappedOptimizer(torch.optim.LBFGS(ddp.parameters()), ddp)
    with raises(ValueError, "ZeroRedundancyOptimizer"):
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        OverlappedOptimizer(zero, ddp)
    inner = CountsInGroup(ddp.parameters(), lr=0.1)
    for group in inner.param_groups:
        group["step"] = 0
    optimizer = OverlappedOptimizer(inner, ddp)
    with raises(ValueError, "already"):
        OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    with raises(RuntimeError, "CountsInGroup", "'step'"):
        train(ddp, optimizer, rank, clear_first=True)


def test_wrong_use_is_refused(ranks: RankPool) -> None:
    ranks.run(2, _refuses)


def _module_changes(rank: int, world: int) -> None:
    def run(ddp: Any, optimizer: Any) -> None:
        train(ddp, optimizer, rank, clear_first=True)
        ddp.module.first.requires_grad_(False)
        train(ddp, optimizer, rank, clear_first=True)
        ddp.module.extra = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(ddp.module.extra.weight)
        train(ddp, optimizer, rank, clear_first=True)

    ddp = check_either_way(make, run, plain_sgd)
    check_equal(ddp.statistics()["deferred"], 0, "deferred with a parameter that gets no gradient")


def test_frozen_and_added_parameters_lose_no_update(ranks: RankPool) -> None:
    ranks.run(2, _module_changes)


def _two_backwards(rank: int, world: int) -> None:
    """Two backwards of one forward equal one backward of twice the loss."""
    results = []
    for twice in (True, False):
        ddp = make()
        optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.05), ddp)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = ddp(batch(rank, step)).square().mean()
            if twice:
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                (2 * loss).backward()
            optimizer.step()
        optimizer.synchronize()
        results.append([p.detach().clone() for p in ddp.parameters()])
    for left, right in zip(*results, strict=True):
        check(torch.allclose(left, right, rtol=1e-4, atol=1e-6), "other parameters")


def test_overlapped_two_backwards_of_one_forward(ranks: RankPool) -> None:
    ranks.run(2, _two_backwards)


class Routed(nn.Module):
    """Skips a layer, or ends backward, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.extra = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, *, routed: bool = True, fails: bool = False) -> Tensor:
        h = torch.tanh(self.first(x))
        if routed:
            h = h + self.extra(h)
        if fails:
            h.register_hook(_fail)
        return self.last(h)


def _fail(_: Tensor) -> None:
    raise ArithmeticError("in backward")


def _other_optimizers_step(rank: int, world: int) -> None:
    """Optimizers of the same parameters, beside one that is dropped. Oracle: bits over ranks."""
    for which in ("new", "inner", "around"):
        torch.manual_seed(0)
        ddp = make()
        inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
        overlapped: Any = OverlappedOptimizer(inner, ddp)
        train(ddp, overlapped, rank, clear_first=True, steps=3)
        others = {"inner": inner, "around": LARC(overlapped)}
        optimizer = others.get(which) or torch.optim.SGD(ddp.parameters(), lr=0.1)
        del overlapped, others
        for step in range(4):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()
        ddp.module.state_dict()  # completes scheduled updates
        check_same_on_all_ranks([p.detach() for p in ddp.parameters()], which)


def test_steps_of_other_optimizers_wait_for_the_averages(ranks: RankPool) -> None:
    ranks.run(2, _other_optimizers_step)


def _left_out_on_one_rank(rank: int, world: int) -> None:
    """One rank waits in backward and steps immediately, the others step in parts."""

    def run(ddp: Any, optimizer: Any) -> None:
        for step in range(STEPS + 4):
            optimizer.zero_grad()
            ddp(batch(rank, step), routed=rank > 0 or step % 4 < 2).square().mean().backward()
            optimizer.step()

    def make_routed() -> Any:
        return DistributedDataParallel(Routed(), message_size=10)

    ddp = check_either_way(make_routed, run, plain_sgd)
    check_same_on_all_ranks(list(ddp.parameters()), "parameters")
    check(rank == 0 or ddp.statistics()["deferred"] > 0, "nothing was deferred")


def test_layer_left_out_on_one_rank_is_no_step_more(ranks: RankPool) -> None:
    ranks.run(2, _left_out_on_one_rank)


def _fails(rank: int, world: int, when: int, other_too: bool) -> None:
    """Every rank orders the plan in the same backward."""

    def run(ddp: Any, optimizer: Any) -> None:
        for step in range(STEPS):
            ddp.zero_grad()
            optimizer.zero_grad()
            x = 1 * batch(rank, step).requires_grad_()
            if other_too and rank == 0 and step == when:
                x.register_hook(_fail)  # when all gradients are in flight
            try:
                ddp(x, fails=rank == 1 and step == when).square().mean().backward()
                if isinstance(optimizer, OverlappedOptimizer):
                    optimizer.synchronize()
            except (ArithmeticError, RuntimeError):
                check_equal(step, when, "the step that failed")
                continue
            check(step != when, "a failure was not seen")
            optimizer.step()
        ddp.zero_grad()

    def make_routed() -> Any:
        return DistributedDataParallel(Routed(), message_size=10)

    ddp = check_either_way(make_routed, run, plain_sgd)
    check_same_on_all_ranks(list(ddp.parameters()), "parameters")


@pytest.mark.parametrize("other_too", [False, True])
@pytest.mark.parametrize("when", range(1, 5))
def test_backward_that_fails_counts_on_no_rank(ranks: RankPool, when: int, other_too: bool) -> None:
    ranks.run(2, _fails, when, other_too)
