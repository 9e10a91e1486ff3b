# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers under amp: several optimizers and losses, overflow, delays, masters, new groups."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amp_support import fresh_amp  # noqa: F401
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex.optimizers import FusedAdagrad
from apex.parallel.LARC import LARC

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


class Toy(nn.Module):
    """Small whole numbers, so that gradients are exact in every dtype."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(offset + torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.gain = nn.Parameter(offset + torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Small enough for float16 at the first dynamic scale of 2**16.
        return (F.linear(x, self.weight).float() * self.gain).sum() * 2.0**-12


#: By name: for each loss, its models and optimizers; for each optimizer, its models; and the loss
#: ids.
SCENARIOS = {
    "two losses, one model": ([((0,), (0,)), ((0,), (0,))], [(0,)], (0, 0)),
    "two losses with ids, one model": ([((0,), (0,)), ((0,), (0,))], [(0,)], (0, 1)),
    "two models, one optimizer": ([((0,), (0,)), ((1,), (0,))], [(0, 1)], (0, 0)),
    "two models, ids, one optimizer": ([((0,), (0,)), ((1,), (0,))], [(0, 1)], (0, 1)),
    "three losses": ([((0,), (0,)), ((1,), (1,)), ((0, 1), (0, 1))], [(0,), (1,)], (0, 1, 2)),
    "three losses, one id": (
        [((0,), (0,)), ((1,), (1,)), ((0, 1), (0, 1))],
        [(0,), (1,)],
        (0,) * 3,
    ),
}
LEVELS = [
    ("O0", {"loss_scale": "dynamic"}),
    ("O1", {}),
    ("O2", {}),
    ("O2", {"loss_scale": 128.0}),
    ("O2-bf16", {"loss_scale": "dynamic"}),
    ("O3", {"loss_scale": "dynamic"}),
]
STEPS = 4


def train(
    scenario: str, level: str | None, options: dict, bad: tuple[int, int] | None, zero: str
) -> list[torch.Tensor]:
    """Train and return the parameters. `bad` is the (step, loss) whose gradient gets an inf."""
    losses, owners, ids = SCENARIOS[scenario]
    models: list[nn.Module] = [Toy(0.0), Toy(1.0)]
    # One parameter of each optimizer is float32 at every level.
    extras = [nn.Parameter(torch.tensor([float(i + 1)])) for i in range(len(owners))]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(
            [p for m in owned for p in models[m].parameters()] + [extras[i]],
            lr=2.0**4,
            momentum=0.5,
        )
        for i, owned in enumerate(owners)
    ]
    if level is not None:
        models, optimizers = amp.initialize(
            models, optimizers, opt_level=level, num_losses=3, verbosity=0, **options
        )
    for step in range(STEPS):
        skipped = set()
        for number, (used, targets) in enumerate(losses):
            loss = sum(models[m](X) for m in used) + sum(extras[o][0] * 2.0**-10 for o in targets)
            chosen = [optimizers[o] for o in targets]
            context = (
                contextlib.nullcontext(loss)
                if level is None
                else amp.scale_loss(loss, chosen, loss_id=ids[number])
            )
            with context as scaled:
                scaled.backward()
                if (step, number) == bad:
                    skipped |= set(targets)
                    if level is not None:
                        models[used[0]].weight.grad[0, 0] = float("inf")
        for number, optimizer in enumerate(optimizers):
            if level is not None or number not in skipped:
                optimizer.step()
        for thing in optimizers if zero == "optimizer" or level is None else models:
            thing.zero_grad()
        if zero != "optimizer":
            for extra in extras:
                extra.grad = None
    params = [p for m in models for p in m.parameters()]
    return [p.detach().float() for p in params + extras]


@pytest.mark.parametrize("zero", ["optimizer", "model"])
@pytest.mark.parametrize("bad", [None, (0, 0), (1, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("level, options", LEVELS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_multiple_everything_matches_float32(
    scenario: str, level: str, options: dict, bad: tuple[int, int] | None, zero: str
) -> None:
    if options.get("loss_scale") == 128.0:
        bad = None  # a static scale never skips
    mine = train(scenario, level, options, bad, zero)
    want = train(scenario, None, {}, bad, zero)
    tolerance = 2e-2 if "bf16" in level else 2e-3
    for a, b in zip(mine, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def one(level: str, **options: object) -> tuple[Toy, torch.optim.Optimizer]:
    model = Toy(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**4)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def backward(
    model: nn.Module, optimizer: object, bad: bool = False, **options: object
) -> torch.Tensor:
    with amp.scale_loss(model(X), optimizer, **options) as scaled:
        scaled.backward()
        if bad:
            model.weight.grad[0, 0] = float("nan")
    return scaled


@pytest.mark.filterwarnings("error")  # of a scheduler's step before the optimizer's
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_overflow_skips_one_step_halves_the_scale_and_says_so(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Toy(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic")
    capsys.readouterr()
    before = [p.detach().clone() for p in model.parameters()]
    step = optimizer.step
    backward(model, optimizer, bad=True)
    optimizer.step()
    scheduler.step()
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in amp.master_params(optimizer)) or level != "O2"
    assert optimizer.step == step
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert not torch.equal(before[0], model.weight)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_overflow_at_a_scale_of_one_is_found(level: str) -> None:
    model, optimizer = one(level, loss_scale="dynamic", max_loss_scale=1.0)
    backward(model, optimizer, bad=True)
    optimizer.step()
    assert _amp_state.loss_scalers[0].loss_scale() == 0.5
    assert not any(p.isnan().any() for p in model.parameters())


def test_scale_loss_yields_float32_loss_times_scale() -> None:
    model, optimizer = one("O2", loss_scale=64.0)
    loss = torch.tensor(1.5, dtype=torch.float16, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype == torch.float32 and scaled.item() == 96.0
    with amp.scale_loss(loss, []) as scaled:  # of a script that unscales itself
        assert scaled.item() == 96.0
    model, optimizer = one("O0")
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype == torch.float32 and scaled.item() == 1.5


def test_scale_loss_leaves_model_grads_scaled_and_master_grads_unscaled() -> None:
    model, optimizer = one("O2", loss_scale=4.0)
    backward(model, optimizer)
    for param, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert param.dtype == param.grad.dtype == torch.float16
        assert master.dtype == master.grad.dtype == torch.float32
        assert torch.equal(param.grad.float(), 4 * master.grad)
    model.zero_grad()
    with amp.scale_loss(model.gain.float().sum(), optimizer) as scaled:
        scaled.backward()
    assert [master.grad is None for master in amp.master_params(optimizer)] == [True, False]
    assert optimizer._amp_stash.all_fp16_params == list(model.parameters())
    assert optimizer._amp_stash.all_fp32_from_fp16_params == list(amp.master_params(optimizer))


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_lists_of_the_stash_are_by_dtype_and_group(level: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer._lazy_init_maybe_master_weights()
    stash = optimizer._amp_stash
    low = [p for p in model.parameters() if p.dtype == torch.float16]
    assert len(low) == {"O0": 0, "O2": 2, "O3": 4}[level]
    others = [p for p in model.parameters() if p.dtype == torch.float32]
    assert stash.all_fp16_params == sum(stash.fp16_groups, []) == low
    assert stash.all_fp32_from_fp32_params == sum(stash.fp32_from_fp32_groups, []) == others
    assert len(stash.all_fp32_from_fp16_params) == (2 if level == "O2" else 0)
    sizes = {"O0": [0, 0], "O2": [2, 0], "O3": [2, 2]}
    assert [len(group) for group in stash.fp16_groups] == sizes[level]


def test_scale_loss_unknown_optimizer_is_refused() -> None:
    model, optimizer = one("O2")
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    for unknown in (other, copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match="a SGD that amp does not know.*to amp.initialize"):
            backward(model, unknown)
    with pytest.raises(TypeError, match="not Toy"):
        backward(model, model)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_parameter_of_two_optimizers_in_contexts_of_other_scales(level: str) -> None:
    model = Toy(0.0)
    pair: list = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    model, pair = amp.initialize(
        model, pair, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0
    )
    backward(model, pair[0])
    once = [p.grad.clone() for p in amp.master_params(pair[0])]
    _amp_state.loss_scalers[1]._loss_scale = 2.0**10
    backward(model, pair[1], loss_id=1)
    for param, grad in zip(amp.master_params(pair[1]), once, strict=True):
        assert torch.equal(param.grad, 2 * grad)


DELAY_LEVELS = [
    ("O0", {"loss_scale": "dynamic"}),
    ("O1", {}),
    ("O2", {}),
    ("O2-bf16", {}),
    ("O3", {"loss_scale": 8.0}),
]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("how", ["step", "closure", "skipped step"])
@pytest.mark.parametrize("level, options", DELAY_LEVELS, ids=str)
def test_step_with_gradients_left_scaled_is_refused_and_changes_nothing(
    level: str, options: dict, how: str, wrapped: bool
) -> None:
    model, optimizer = one(level, num_losses=2, **options)
    if how == "closure" and "O2" in level:
        pytest.skip("master weights refuse closures")
    stepped = LARC(optimizer) if wrapped else optimizer
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    if how == "skipped step" and _amp_state.loss_scalers[0].dynamic:
        backward(model, stepped, bad=True)

    def closure() -> torch.Tensor:
        return backward(model, stepped, delay_unscale=True, loss_id=1)

    with pytest.raises(RuntimeError, match="still multiplied.*without delay_unscale.*zero_grad"):
        if how == "closure":
            stepped.step(closure)
        else:
            closure()
            stepped.step()
    for master, value in zip(amp.master_params(optimizer), before, strict=True):
        assert torch.equal(master, value)
    stepped.zero_grad()
    stepped.step()  # without gradients, or the step that is skipped
    for master, value in zip(amp.master_params(optimizer), before, strict=True):
        assert torch.equal(master, value)
    closure()
    backward(model, stepped)
    stepped.step()
    assert not torch.equal(next(amp.master_params(optimizer)), before[0])


def test_clip_of_master_params_acts_on_unscaled_gradients() -> None:
    norms = []
    for level in ("O0", "O1", "O2", "O3"):
        model, optimizer = one(level, loss_scale=64.0)
        backward(model, optimizer)
        norms.append(nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.0**-8).float())
        again = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 100.0)
        torch.testing.assert_close(again.float(), torch.tensor(2.0**-8), rtol=1e-2, atol=0)
        amp._amp_state.handle and amp._amp_state.handle._deactivate()
    for norm in norms:
        torch.testing.assert_close(norm, norms[0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O2-bf16"])
def test_add_param_group_mid_training_matches_float32(level: str, bad: int | None) -> None:
    def run(level: str | None) -> list[torch.Tensor]:
        models: list[nn.Module] = [Toy(0.0), Toy(1.0)]
        optimizer = torch.optim.SGD(models[0].parameters(), lr=2.0**4, momentum=0.5)
        if level is not None:
            models, optimizer = amp.initialize(
                models, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
            )
        for step in range(4):
            if step == 1:
                # In the middle of gradient accumulation, with another learning rate.
                optimizer.add_param_group({"params": models[1].parameters(), "lr": 2.0**3})
            loss = models[0](X) + models[1](X)
            context = contextlib.nullcontext(loss) if level is None else None
            with context or amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                if step == bad and level is not None:
                    models[0].weight.grad[0, 0] = float("inf")
            if level is not None or step != bad:
                optimizer.step()
            for model in models:
                model.zero_grad()
        return [p.detach().float() for m in models for p in m.parameters()]

    mine, want = run(level), run(None)
    tolerance = 2e-2 if "bf16" in level else 2e-3
    for a, b in zip(mine, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_add_param_group_makes_masters_at_once_and_refuses_duplicates() -> None:
    model, optimizer = one("O2")
    other = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer.add_param_group({"params": [other]})
    assert optimizer.param_groups[1]["params"][0].dtype == torch.float32
    for duplicate in (other, model.weight):
        with pytest.raises(ValueError, match="group"):
            optimizer.add_param_group({"params": [duplicate]})
    assert len(optimizer.param_groups) == 2
    assert all(p.dtype == torch.float32 for p in amp.master_params(optimizer))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_parameter_added_with_a_gradient_is_refused_until_it_is_cleared(level: str) -> None:
    models: list[nn.Module] = [Toy(0.0), Toy(1.0)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=1.0)
    models, optimizer = amp.initialize(
        models, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    with amp.scale_loss(models[0](X) + models[1](X), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(RuntimeError, match="parameter 0 given to SGD.add_param_group"):
        optimizer.add_param_group({"params": models[1].parameters()})
    models[1].zero_grad(set_to_none=False)
    optimizer.add_param_group({"params": models[1].parameters()})
    backward(models[1], optimizer)


def test_frozen_parameter_gets_no_master_until_it_is_unfrozen() -> None:
    model = Toy(0.0)
    model.gain.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**4)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    backward(model, optimizer)
    optimizer.step()
    assert list(amp.master_params(optimizer))[1] is model.gain
    assert torch.equal(model.gain, torch.tensor([1.0, 2.0], dtype=torch.float16))
    model.gain.requires_grad_(True)
    backward(model, optimizer)
    optimizer.step()
    assert list(amp.master_params(optimizer))[1].dtype == torch.float32
    assert not torch.equal(model.gain, torch.tensor([1.0, 2.0], dtype=torch.float16))


def test_master_weights_are_made_lazily_and_by_the_hooks_scripts_call() -> None:
    for call in (
        lambda o: o.zero_grad(),
        lambda o: o._amp_lazy_init(),
        lambda o: o._lazy_init_maybe_master_weights(),
        lambda o: o.load_state_dict(o.state_dict()),
    ):
        model, optimizer = one("O2")
        assert next(amp.master_params(optimizer)) is model.weight
        call(optimizer)
        optimizer._amp_stash.lazy_init_called = True
        master = next(amp.master_params(optimizer))
        assert master.dtype == torch.float32 and master.requires_grad
        backward(model, optimizer)
        assert next(amp.master_params(optimizer)) is master


def test_step_with_closure_raises_with_masters_and_works_without() -> None:
    model, optimizer = one("O2")
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)
    model = Toy(0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=1.0, verbosity=0)
    types, losses = [], []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        types.append((X @ X).dtype)
        loss = (model(X) - 3).pow(2)
        losses.append(loss.item())
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(types) > 1 and set(types) == {torch.float16}, "casts were off inside the closure"
    assert losses[-1] < losses[0], "a stale cast was used after the parameters changed"


def test_step_runs_with_casts_off() -> None:
    class Recorder(torch.optim.SGD):
        def step(self, closure: Callable | None = None) -> None:
            self.kind = (X @ X).dtype
            super().step()

    model = Toy(0.0)
    optimizer = Recorder(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    backward(model, optimizer)
    optimizer.step()
    assert optimizer.kind == torch.float32 and (X @ X).dtype == torch.float16


# Not O2: torch cannot add sparse float16 tensors on the CPU.
@pytest.mark.parametrize("level", ["O0", "O1", "O2-bf16"])
def test_sparse_gradients_are_unscaled(level: str) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table, optimizer = amp.initialize(
        table, optimizer, opt_level=level, loss_scale=8.0, verbosity=0
    )
    before = table.weight.detach().float().clone()
    for _ in range(2):
        with amp.scale_loss(table(torch.tensor([1, 1, 3])).float().sum(), optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    moved = (before - table.weight.detach().float()).round()
    assert torch.equal(moved[:, 0], torch.tensor([0.0, 4.0, 0.0, 2.0, 0.0]))


def _lbfgs_losses(level: str | None, **options: object) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(2, 2)
    optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=1, **options)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        # Gradients times 2**16 do not fit into float16.
        loss = (model(X).float() - 3).square().sum()
        context = contextlib.nullcontext(loss) if level is None else amp.scale_loss(loss, optimizer)
        with context as scaled:
            scaled.backward()
        return loss

    for _ in range(5):
        losses.append(optimizer.step(closure).item())
    return losses, model


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_overflow_in_a_closure_is_evaluated_again_not_stepped(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, model = _lbfgs_losses(level, loss_scale="dynamic")
    assert "Gradient overflow in a closure" in capsys.readouterr().out
    assert _amp_state.loss_scalers[0].loss_scale() < 2.0**16
    assert all(p.isfinite().all() for p in model.parameters())
    amp._amp_state.handle and amp._amp_state.handle._deactivate()
    want, _ = _lbfgs_losses(None)
    assert losses[0] == pytest.approx(want[0], rel=1e-2)
    assert losses[-1] < 0.05 * losses[0]


def test_zero_grad_sets_zeros_if_set_grad_none_is_false() -> None:
    model: nn.Module = Toy(0.0)
    optimizer: Any = FusedAdagrad(model.parameters(), set_grad_none=False)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    backward(model, optimizer)
    optimizer.zero_grad()
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
