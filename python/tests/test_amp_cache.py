# SPDX-License-Identifier: BSD-3-Clause
"""Level O1's cache of cast parameters: one cast per iteration, and never a stale one."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import nn
from torch.autograd import backward, grad

from apex import amp
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel.LARC import LARC


def casts_of(tensor: torch.Tensor, run: object) -> int:
    """The number of casts of `tensor` in `run`, from the profiler's conversions of its shape."""
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    return sum(
        event.count
        for event in profile.key_averages(group_by_input_shape=True)
        if event.key == "aten::_to_copy" and event.input_shapes[0] == list(tensor.shape)
    )


def prepare(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)


def test_cache_parameter_used_three_times_is_cast_once() -> None:
    model, _ = prepare(nn.Linear(5, 5))
    x = torch.rand(3, 5).half()
    assert casts_of(model.weight, lambda: model(model(model(x)))) == 1


def test_cache_disabled_parameter_is_cast_every_time() -> None:
    handle = amp.init(enable_caching=False, device_types=("cpu",))
    model = nn.Linear(5, 5)
    x = torch.rand(3, 5).half()
    assert casts_of(model.weight, lambda: model(model(x))) == 2
    assert not handle.has_cache and len(handle.cache) == 0


def test_cache_scale_loss_exit_drops_it() -> None:
    model, optimizer = prepare(nn.Linear(5, 5))
    handle = amp._amp_state.handle
    loss = model(torch.rand(3, 5)).float().sum()
    assert len(handle.cache) == 2
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert len(handle.cache) == 0


@pytest.mark.parametrize("order", ["train eval train", "eval train", "eval eval train train"])
@pytest.mark.parametrize("how", ["no_grad", "frozen", "inference_mode"])
def test_cache_evaluation_between_training_steps_changes_no_gradient(order: str, how: str) -> None:
    reference = nn.Linear(4, 4)
    model, optimizer = prepare(copy.deepcopy(reference))
    ref_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    x = torch.rand(3, 4)
    for phase in order.split():
        if phase == "eval":
            if how == "frozen":
                model.requires_grad_(False)
                assert not model(x).requires_grad
                model.requires_grad_(True)
            else:
                with getattr(torch, how)():
                    assert not model(x).requires_grad
            continue
        model(x)  # a forward whose graph is discarded
        loss = model(x).float().pow(2).mean()
        assert loss.requires_grad
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        ref_optimizer.zero_grad()
        with amp.disable_casts():
            reference(x).pow(2).mean().backward()
        torch.testing.assert_close(model.weight.grad, reference.weight.grad, rtol=5e-3, atol=1e-3)
        optimizer.step()
        ref_optimizer.step()


def test_cache_shared_weight_gradients_add_up_on_the_float32_parameter() -> None:
    model, optimizer = prepare(nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)]))
    model[1].weight = model[0].weight
    x = torch.eye(4)
    with amp.scale_loss(sum(layer(x).float().sum() for layer in model), optimizer) as scaled:
        scaled.backward()
    assert model[0].weight.grad.dtype == torch.float32
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 2.0))


@pytest.mark.parametrize("make", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cache_recurrent_cell_over_time_matches_float32(make: type[nn.Module]) -> None:
    reference = make(3, 4)
    model, optimizer = prepare(copy.deepcopy(reference))
    inputs = torch.rand(5, 2, 3)

    def unroll(cell: nn.Module) -> torch.Tensor:
        state = None
        for step in inputs:
            state = cell(step, state)
        output = state[0] if isinstance(state, tuple) else state
        return output.float().pow(2).sum()

    assert casts_of(model.weight_hh, lambda: unroll(model)) == 1
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(unroll(model), optimizer) as scaled:
            scaled.backward()
    with amp.disable_casts():
        unroll(reference).backward()
    for mine, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("write", ["in_place", "data", "load_state_dict"])
def test_cache_parameter_written_between_forwards_is_cast_anew(write: str) -> None:
    model, _ = prepare(nn.Linear(4, 4, bias=False))
    x = torch.eye(4)
    model(x)
    value = torch.full((4, 4), 3.0)
    if write == "in_place":
        with torch.no_grad():
            model.weight.copy_(value)
    elif write == "data":
        model.weight.data = value.clone()
    else:
        model.load_state_dict({"weight": value})
    assert torch.equal(model(x), value.half())


def test_compiled_model_runs_in_half_and_trains() -> None:
    model, optimizer = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = torch.rand(3, 4)
    expected = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        output = compiled(x)
        assert output.dtype == torch.float16
        torch.testing.assert_close(output, expected)
        optimizer.zero_grad()
        with amp.scale_loss(output.float().sum(), optimizer) as scaled:
            scaled.backward()
        assert model[0].weight.grad.abs().sum() > 0


OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.05),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.05),
    "LARC": lambda p: LARC(FusedSGD(p, lr=0.05)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
}


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["plain backward", "forward before the step", "other thread"])
def test_cache_optimizer_that_moves_no_version_trains_as_without_cache(
    optimizer_name: str, how: str
) -> None:
    x = torch.rand(16, 4, generator=torch.Generator().manual_seed(1))

    def losses(enable_caching: bool) -> list[float]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        handle = amp.init(
            enable_caching=enable_caching, dtype=torch.bfloat16, device_types=("cpu",)
        )
        values = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
            if how == "other thread":
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
            else:
                loss.backward()
            if how == "forward before the step":
                assert model(x).requires_grad
            optimizer.step()
            values.append(loss.item())
        handle._deactivate()
        return values

    mine = losses(True)
    assert mine == losses(False)
    assert mine[-1] < mine[0]


WRITES = {
    "data": lambda p, v: p.data.copy_(v),
    "numpy": lambda p, v: np.copyto(p.detach().numpy(), v.numpy()),
    "dlpack": lambda p, v: torch.from_dlpack(torch.to_dlpack(p.detach())).copy_(v),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "entry",
    ["backward", "autograd.grad", "backward that raises", "early backward", "early grad", "input"],
)
def test_cache_write_that_moves_no_version_after_backward_counts(write: str, entry: str) -> None:
    model, _ = prepare(nn.Linear(4, 4, bias=False))
    x = torch.eye(4, requires_grad=True)
    loss = model(x).float().sum()
    if entry == "backward":
        loss.backward()
    elif entry == "early backward":  # imported before initialize
        backward(loss)
    elif entry == "early grad":
        grad(loss, model.weight)
    elif entry == "input":
        grad(loss, x)
    elif entry == "autograd.grad":
        torch.autograd.grad(loss, model.weight)
    else:
        handle = model.weight.register_post_accumulate_grad_hook(lambda p: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    value = torch.full((4, 4), 3.0)
    version = model.weight._version
    WRITES[write](model.weight, value)
    assert model.weight._version == version, "this write would be seen in any case"
    assert torch.equal(model(x), value.half())


def test_cache_nested_backwards_and_double_backward_match_float32() -> None:
    """A checkpoint recomputes inside a backward, and a second derivative reuses the casts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    reference = copy.deepcopy(model)
    model, _ = prepare(model)
    x = torch.rand(3, 4)

    def penalised(net: nn.Module, reentrant: bool) -> None:
        leaf = x.clone().requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(net[:2], leaf, use_reentrant=reentrant)
        loss = net[2](hidden).float().sum()
        if not reentrant:
            loss = loss + grad(loss, leaf, create_graph=True)[0].square().sum()
        backward(loss)

    for reentrant in (True, False):
        penalised(model, reentrant)
        assert len(amp._amp_state.handle.cache) == 0
        with amp.disable_casts():
            penalised(reference, reentrant)
    for mine, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad, rtol=2e-2, atol=5e-3)


def _bad_step(optimizer: torch.optim.Optimizer) -> None:
    raise KeyError


@pytest.mark.parametrize("how", ["skipped", "raises", "closure raises"])
@pytest.mark.parametrize("write", WRITES)
def test_cache_write_after_a_step_that_is_none_counts(write: str, how: str) -> None:
    """A forward with gradients between scale_loss and a step without effect leaves no stale
    cast."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "raises":
        optimizer.register_step_pre_hook(lambda *_: _bad_step(optimizer))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    x = torch.eye(4)
    with amp.scale_loss(model(x).float().mean(), optimizer) as scaled:
        scaled.backward()
        if how == "skipped":
            model.weight.grad[0, 0] = float("inf")

    def closure() -> float:
        model(x)
        raise KeyError

    assert model(x).requires_grad
    if how == "skipped":
        optimizer.step()
    else:
        with pytest.raises(KeyError):
            optimizer.step(closure if how == "closure raises" else None)
    value = torch.full((4, 4), 3.0)
    WRITES[write](model.weight, value)
    assert torch.equal(model(x), value.half())


def test_cache_keeps_no_dropped_parameter_alive() -> None:
    model, optimizer = prepare(nn.Linear(4, 4))
    other = nn.Linear(4, 4)
    dropped = weakref.ref(other.weight)
    model(torch.rand(1, 4))
    other(torch.rand(1, 4))
    cache = amp._amp_state.handle.cache
    assert len(cache) == 4
    node = nn.Identity()
    vars(node)["itself"] = other.weight.holds = node
    held = weakref.ref(node)
    del other, node
    gc.collect()
    assert dropped() is None
    assert held() is None, "the cache is looked at before garbage is collected, and not after"
    assert len(cache) == 2, "parameters in use were forgotten as well"
