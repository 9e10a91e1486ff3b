"""Level O1's cache of cast parameters: one cast per iteration, and never a stale one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from amp_support import fresh_amp  # noqa: F401
from torch import nn

from apex import amp


def casts_of(tensor: torch.Tensor, run: object) -> int:
    """How often `run` casts `tensor`, by the profiler's count of conversions of its shape."""
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


def test_cache_static_scale_of_one_is_dropped_as_well() -> None:
    model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, "O1", loss_scale=1.0, verbosity=0)
    with amp.scale_loss(model(torch.rand(3, 5)).float().sum(), optimizer) as scaled:
        scaled.backward()
    assert len(amp._amp_state.handle.cache) == 0


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
        model(x)  # a forward whose graph is thrown away
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


def test_cache_evaluation_inside_an_iteration_leaves_the_graph_alone() -> None:
    model, optimizer = prepare(nn.Linear(4, 4))
    x = torch.rand(3, 4)
    first = model(x).float().sum()
    with torch.no_grad():
        model(x)
    second = model(x).float().sum()
    with amp.scale_loss(first + second, optimizer) as scaled:
        scaled.backward()
    torch.testing.assert_close(model.weight.grad, 2 * x.sum(0).expand(4, 4), rtol=1e-2, atol=1e-2)


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


def test_cache_step_without_scale_loss_leaves_nothing_stale() -> None:
    model, optimizer = prepare(nn.Linear(4, 4, bias=False))
    x = torch.eye(4)
    model(x).float().sum().backward()
    optimizer.step()
    assert torch.equal(model(x), F.linear(x.half(), model.weight.detach().half()))


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
