# SPDX-License-Identifier: BSD-3-Clause
"""The wrapper's interface to scripts: state, copies, optimizers, compilers, hooks; Reducer."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import batch, build, data, make
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_gradients,
    check_same_on_all_ranks,
    check_step,
    gradients,
    on_ranks,
    to_reference,
)
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel, Reducer
from apex.parallel._devices import single_device
from apex.parallel.distributed import flat_dist_call

pytestmark = pytest.mark.processes


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(batch(rank, step)).square().mean()


@on_ranks(2)
def test_state_dict_and_attributes_as_scripts_expect(rank: int, world: int) -> None:
    model = make()
    ddp = DistributedDataParallel(model, message_size=77, delay_allreduce=1)  # as old scripts do
    check_equal(list(ddp.state_dict()), [f"module.{name}" for name in model.state_dict()], "keys")
    other = DistributedDataParallel(make(5))
    other.load_state_dict(ddp.state_dict())
    for (name, a), b in zip(ddp.named_parameters(), other.parameters(), strict=True):
        check_equal(a.data, b.data, f"{name}, loaded")
    plain = make(6)
    plain.load_state_dict({k.removeprefix("module."): v for k, v in ddp.state_dict().items()})
    check(ddp.module is model, "module is another object")
    check(not isinstance(ddp, nn.parallel.DistributedDataParallel), "a subclass of torch's class")
    check_equal((ddp.world_size, type(ddp.world_size)), (float(world), float), "world_size")
    check_equal((ddp.message_size, ddp.delay_allreduce), (77, True), "options")
    check_equal([p.shape for p in ddp.active_params], [p.shape for p in model.parameters()], "")
    check_equal((ddp.needs_refresh, ddp.allreduce_buffers), (True, []), "before the first step")
    check(ddp.train() is ddp and model.training, "train()")
    check(ddp.eval() is ddp and not model.training, "eval()")
    check_equal(ddp.zero_grad(), None, "zero_grad()")


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch_save"])
@on_ranks(2)
def test_copy_of_the_wrapper_trains(rank: int, world: int, how: str, trained: bool) -> None:
    ddp = DistributedDataParallel(
        make(), message_size=30, gradient_as_bucket_view=True, gradient_predivide_factor=2.0
    )
    if trained:
        check_step(ddp, _loss, "before")
    if how == "deepcopy":
        twin = copy.deepcopy(ddp)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(ddp))
    else:
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    check_equal((twin.message_size, twin.gradient_predivide_factor), (30, 2.0), "options")
    for a, b in zip(ddp.parameters(), twin.parameters(), strict=True):
        check(a is not b and torch.equal(a, b), "parameters are shared or differ")
    with torch.no_grad():
        check_equal(twin(batch(0, 0)), ddp(batch(0, 0)), "output")
    for step in range(3):
        check_step(twin, lambda m, r, s=step: _loss(m, r, s), f"the copy, step {step}")
        check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"the original, step {step}")
    with twin.no_sync():
        _loss(twin, rank).backward()


def test_pickled_wrapper_without_group_evaluates(ranks: RankPool) -> None:
    content = ranks.run(1, _pickled)[0]
    assert not dist.is_initialized()
    ddp = pickle.loads(content)
    with torch.no_grad():
        assert ddp(batch(0, 0)).shape == (4, 4)
    with pytest.raises(RuntimeError, match="init_process_group"):
        ddp(batch(0, 0))


def _pickled(rank: int, world: int) -> bytes:
    return pickle.dumps(DistributedDataParallel(make()))


@pytest.mark.parametrize("arguments", [
    ((), {"device_ids": [0]}), ((), {"device_ids": [0], "output_device": 0}), (([0],), {}),
    (([torch.device("cpu")],), {}), ((), {"device_ids": []}), ((), {"device_ids": [-1]}),
    ((), {"dim": 0}), (([0], None), {}), ((None,), {}), ((None, None), {}),
    ((), {"device_ids": None, "output_device": None, "find_unused_parameters": True}),
])  # fmt: skip
@on_ranks(2)
def test_device_ids_on_cpu_are_accepted(rank: int, world: int, arguments: Any) -> None:
    args, kwargs = arguments
    ddp = DistributedDataParallel(make(), *args, **kwargs)
    check_equal((ddp.message_size, ddp.delay_allreduce), (10_000_000, False), "options")
    check_step(ddp, _loss, f"{args} {kwargs}")


def test_negative_device_id_is_the_device_of_the_module() -> None:
    """The default of --local_rank in old scripts, which torchrun does not pass."""
    parameters = [nn.Parameter(torch.empty(1, device="meta"))]
    meta = torch.device("meta")
    assert single_device([-1], None, parameters) == (meta, None)
    assert single_device([-1], -1, parameters) == (meta, meta)


@on_ranks(3)
def test_process_group_averages_over_its_ranks_only(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[rank % 2]
    ddp = DistributedDataParallel(make(rank), process_group=mine)
    check_equal(ddp.world_size, float(mine.size()), "world_size")
    plain = to_reference(make(rank % 2))
    for r in range(rank % 2, world, 2):
        (_loss(plain, r) / mine.size()).backward()
    _loss(ddp, rank).backward()
    check_gradients(ddp, gradients(plain), "in a group of its own", 1e-4)


class _WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("number", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


@pytest.mark.parametrize(("options", "kept"), [
    ({}, True), ({"broadcast_buffers": True}, False), ({"forward_sync_buffers": True}, False),
    ({"broadcast_buffers": False}, True),
])  # fmt: skip
@on_ranks(2)
def test_buffers_are_left_alone_unless_asked(
    rank: int, world: int, options: dict[str, Any], kept: bool
) -> None:
    model = build(_WithBuffers)
    model.number.fill_(rank)
    ddp = DistributedDataParallel(model, **options)
    check_equal(int(model.number), rank if kept else 0, "buffer after construction")
    for step in range(2):
        model.number.fill_(rank + 10)
        ddp(data(rank, step)).sum().backward()
        check_equal(int(model.number), rank + 10 if kept else 10, f"buffer in step {step}")
    model.number.fill_(rank + 20)
    with ddp.no_sync():
        ddp(data(rank))
    ddp.eval()
    ddp(data(rank))
    check_equal(int(model.number), rank + 20, "buffer after no_sync() and evaluation")
    ddp.train()
    ddp(data(rank))
    means = [torch.zeros(4) for _ in range(world)]
    dist.all_gather(means, model.norm.running_mean)
    check(not torch.equal(*means), "running means agree though batches differ")


@on_ranks(2)
def test_reducer_of_a_module_averages_when_asked(rank: int, world: int) -> None:
    model = make(rank)
    reducer = Reducer(model)
    check_same_on_all_ranks([p.data for p in model.parameters()], "parameters")
    model.c.bias.requires_grad_(False)
    for step in range(2):
        reference = to_reference(model)
        reference(torch.cat([batch(r, step) for r in range(world)])).square().mean().backward()
        model.zero_grad()
        _loss(model, rank, step).backward()
        local = gradients(model)
        check(not torch.allclose(local["a.weight"], gradients(reference)["a.weight"].float()), "")
        reducer.reduce()
        check_gradients(model, gradients(reference), f"step {step}", 1e-4)
    check(model.c.bias.grad is None, "a frozen parameter got a gradient")


@on_ranks(2)
def test_reducer_of_tensors_averages_in_place(rank: int, world: int) -> None:
    tensors = [
        torch.full((3,), float(rank)),
        [torch.full((2, 2), 4.0 * rank, dtype=torch.float64), (torch.full((1,), 2.0 * rank),)],
        torch.full((2,), 6.0 * rank, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).t() * rank,
    ]
    with pytest.raises(TypeError, match="Reducer takes a torch.nn.Module, .* got int"):
        Reducer(5)  # type: ignore[arg-type]
    reducer = Reducer(tensors)
    reducer.reduce()
    check_equal(tensors[0], torch.full((3,), 0.5), "first")
    check_equal(tensors[1][0], torch.full((2, 2), 2.0, dtype=torch.float64), "float64")
    check_equal(tensors[1][1][0], torch.full((1,), 1.0), "nested")
    check_equal(tensors[2], torch.full((2,), 3.0, dtype=torch.bfloat16), "bfloat16")
    check_equal(tensors[3], torch.arange(6.0).reshape(2, 3).t() * 0.5, "transposed")


@on_ranks(2)
def test_flat_dist_call_averages_and_broadcasts(rank: int, world: int) -> None:
    def make() -> list[Tensor]:
        return [
            torch.full((3,), 1.0 + rank),
            torch.full((2, 2), 2.0 + rank, dtype=torch.float64),
            torch.arange(6.0).reshape(2, 3).t() + rank,
        ]

    tensors = make()
    flat_dist_call(tensors, dist.all_reduce)
    check_equal(tensors[0], torch.full((3,), 1.5), "averaged")
    check_equal(tensors[2], torch.arange(6.0).reshape(2, 3).t() + 0.5, "averaged, transposed")
    tensors = make()
    flat_dist_call(tensors, dist.broadcast, (1,))
    check_equal(tensors[0], torch.full((3,), 2.0), "broadcast from rank 1")
    check_equal(tensors[1], torch.full((2, 2), 3.0, dtype=torch.float64), "broadcast, float64")
    flat_dist_call([], dist.all_reduce)
