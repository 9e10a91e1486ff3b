# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm on several ranks compared with one-process float64 batch norm on the whole
batch."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import host_channel, on_ranks, raises
from nccl_like import eager_nccl
from sync_batch_norm_support import (
    CutGradient,
    assert_near,
    reference_batch_norm,
)

from apex.parallel import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    syncbn_group,
)

c10d: Any = torch._C._distributed_c10d

pytestmark = pytest.mark.processes


@on_ranks(2)
def test_running_statistics_have_the_same_bits_where_dtypes_of_inputs_differ(
    rank: int, world: int
) -> None:
    for statistics in (torch.float32, torch.float64):
        layer = SyncBatchNorm(16).to(statistics)
        torch.manual_seed(rank)
        for _ in range(10):
            layer(torch.randn(3, 16, 5, dtype=torch.float64 if rank == 0 else torch.float32))
        for buffer in (layer.running_mean, layer.running_var):
            gathered = [torch.empty_like(buffer) for _ in range(world)]
            dist.all_gather(gathered, buffer)
            assert all(torch.equal(gathered[0], other) for other in gathered)


@pytest.mark.parametrize("rows", [False, True], ids=["planes", "rows"])
@on_ranks(2)
def test_a_large_mean_costs_no_digits_of_float32(rank: int, world: int, rows: bool) -> None:
    torch.manual_seed(0)
    whole = torch.randn(4, 3, 5, 9) + 1e4
    dy = torch.randn(4, 3, 5, 9)
    want = whole.double().requires_grad_()
    y = torch.nn.functional.batch_norm(want, None, None, training=True)
    y.backward(dy.double())
    part = slice(2 * rank, 2 * rank + 2)
    memory = torch.channels_last if rows else torch.contiguous_format
    x = whole[part].contiguous(memory_format=memory).requires_grad_()
    got = SyncBatchNorm(3, affine=False, momentum=1.0)(x)
    got.backward(dy[part])
    assert want.grad is not None and x.grad is not None
    torch.testing.assert_close(got.double(), y[part], rtol=0, atol=2e-6)
    torch.testing.assert_close(x.grad.double(), want.grad[part], rtol=0, atol=2e-6)


@on_ranks(4)
def test_sync_batch_norm_process_group_is_used(rank: int, world: int) -> None:
    x = torch.arange(16.0).view(8, 2)[2 * rank : 2 * rank + 2] ** 2
    pair = create_syncbn_process_group(2)
    module = SyncBatchNorm(2, process_group=pair)
    first = 4 * (rank // 2)
    both = torch.arange(16.0).view(8, 2)[first : first + 4] ** 2
    want = reference_batch_norm(both.double(), None, None, None, 1e-5, False, False)[0]
    torch.testing.assert_close(module(x).double(), want[2 * (rank % 2) :][:2], rtol=0, atol=1e-5)
    again = convert_syncbn_model(torch.nn.Sequential(SyncBatchNorm(2)), process_group=pair)
    assert again[0].process_group is pair
    with raises(ValueError, "not a member of its process_group"):
        convert_syncbn_model(again, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    # A copy shares the group, a pickle drops it.
    assert copy.deepcopy(module).process_group is pair
    assert copy.copy(module).process_group is pair
    assert pickle.loads(pickle.dumps(module)).process_group is None
    assert copy.copy(module)._process_group_name == module._process_group_name
    # Without a given group, a separate communicator is created once.
    names = {SyncBatchNorm(2)._process_group_name for _ in range(2)}
    assert names == {None}
    own = syncbn_group.default_group()
    assert syncbn_group.default_group() is own
    assert own is not dist.group.WORLD
    assert own.size() == world
    alone = create_syncbn_process_group(1)
    plain = torch.nn.BatchNorm1d(2)
    torch.testing.assert_close(SyncBatchNorm(2, process_group=alone)(x), plain(x))
    # A world that cannot be split is refused before any group is created.
    with pytest.raises(ValueError, match="cannot be split"):
        create_syncbn_process_group(3)
    assert create_syncbn_process_group(0) is None
    stranger = dist.new_group([0])
    if rank != 0:
        with pytest.raises(ValueError, match="not a member"):
            SyncBatchNorm(2, process_group=stranger)


@on_ranks(4)
def test_groups_of_eager_nccl_are_split_at_once_and_when_the_device_is_idle(
    rank: int, world: int
) -> None:
    syncbn_group._own_group = None  # an earlier test on these ranks may have created it
    with eager_nccl() as asked:
        pair = create_syncbn_process_group(2)
        assert asked == ["synchronize", "split_group [[0, 1], [2, 3]]"], asked
        # Created in the first forward, while DistributedDataParallel's broadcast may be in
        # progress.
        assert syncbn_group.default_group().size() == world
        assert asked[2:] == ["synchronize", "new_group"], asked
    assert dist.get_process_group_ranks(pair) == [rank // 2 * 2, rank // 2 * 2 + 1]
    found = torch.tensor(float(rank))
    dist.all_reduce(found, group=pair)
    assert float(found) == (1.0 if rank < 2 else 5.0)


@pytest.mark.parametrize("channel", ["0", "1"])
@on_ranks(2)
def test_sync_batch_norm_one_collective_per_direction(rank: int, world: int, channel: str) -> None:
    os.environ["APEX_HOST_CHANNEL"] = channel
    exchange = ["c10d::alltoall_base_"] if channel == "0" else []  # in shared memory
    # A group makes this choice once.
    module = SyncBatchNorm(4, fuse_relu=True, process_group=dist.new_group())
    x = torch.randn(3, 4, 5, requires_grad=True)
    module(x, torch.randn(3, 4, 5)).sum().backward()  # creates the communicator
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        y = module(x, torch.randn(3, 4, 5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        y.sum().backward()

    def collectives(profile: torch.profiler.profile) -> list[str]:
        return sorted(e.name for e in profile.events() if e.name.startswith("c10d::"))

    assert collectives(forward) == exchange
    assert collectives(backward) == exchange  # one round, while a sum takes two
    module.eval()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as evaluation:
        module(x).sum().backward()
    assert collectives(evaluation) == []
    # Parameters alone involve no other rank.
    module.train()
    y = module(torch.randn(3, 4, 5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as parameters:
        y.sum().backward()
    assert collectives(parameters) == []


@pytest.mark.parametrize("channel", ["0", "1"])
@on_ranks(2)
def test_sync_batch_norm_many_channels_take_two_messages(
    rank: int, world: int, channel: str
) -> None:
    os.environ["APEX_HOST_CHANNEL"] = channel
    channels = 40_000  # more values than are gathered in one message
    whole = torch.randn(
        6, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    dy = torch.randn(6, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    x = whole[3 * rank : 3 * rank + 3].clone().requires_grad_()
    y = SyncBatchNorm(channels, affine=False, process_group=dist.new_group())(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(dy[3 * rank : 3 * rank + 3])
    names = [e.name for e in profile.events() if e.name.startswith("c10d::")]
    through_gloo = [
        "c10d::alltoall_base_",
        "c10d::_allgather_base_",
    ]  # headers alone are sent first
    assert names == (through_gloo if channel == "0" else [])
    whole.requires_grad_()
    want = reference_batch_norm(whole, None, None, None, 1e-5, False, False)[0]
    (dx,) = torch.autograd.grad(want, whole, dy)
    assert x.grad is not None
    assert_near(x.grad, dx[3 * rank : 3 * rank + 3], torch.float64, "gradient")


@on_ranks(2)
def test_sync_batch_norm_rank_without_gradient_does_not_keep_others_waiting(
    rank: int, world: int
) -> None:
    module = SyncBatchNorm(2, affine=False)
    x = torch.arange(12.0).view(6, 2).cos()[3 * rank : 3 * rank + 3].requires_grad_()
    y = CutGradient.apply(module(x), rank == 0)
    (y**3).sum().backward()
    whole = torch.arange(12.0).view(6, 2).cos().requires_grad_()
    want = torch.nn.functional.batch_norm(whole, None, None, training=True)
    (want[3:] ** 3).sum().backward()
    torch.testing.assert_close(x.grad, whole.grad[3 * rank : 3 * rank + 3], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_sync_batch_norm_compiled_for_a_destroyed_group_raises(rank: int, world: int) -> None:
    compiled = torch.compile(SyncBatchNorm(4), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4)
    compiled(x)
    name = syncbn_group.default_group().group_name
    dist.barrier()
    dist.destroy_process_group(syncbn_group.default_group())
    # torch does this after destroy_process_group() and init_process_group()
    other = dist.new_group()
    c10d._register_process_group(name, other)
    try:
        with raises(RuntimeError, "no process group is registered", "destroyed"):
            compiled(x)
    finally:
        c10d._unregister_process_group(name)


@on_ranks(2)
def test_sync_batch_norm_counts_are_exact_beyond_float32(rank: int, world: int) -> None:
    # 2^24 + 1 values in total. A float32 count would lose the last one, and with it the unbiased
    # factor.
    rows = (1 << 24) if rank == 0 else 1
    results = torch.ops.apex.sync_batch_norm(
        torch.zeros(rows, 1, dtype=torch.float16), None, None, None, None, None, 0.1, 1e-5,
        dist.group.WORLD.group_name,
    )  # fmt: skip
    assert int(results[3]) == (1 << 24) + 1


@on_ranks(2)
def test_sync_batch_norm_different_layers_are_refused(rank: int, world: int) -> None:
    """Both paths of ranks on one host: each compares layers before it reads values."""
    for channel in ("0", "1"):
        with host_channel(channel):
            for channels in (4, 5000):  # in one message, and in two
                group = dist.new_group()
                other = SyncBatchNorm(3 if rank == 0 else channels, process_group=group)
                with pytest.raises(RuntimeError, match="the ranks are in different.*use eval"):
                    other(torch.randn(4, other.num_features))
            group = dist.new_group()
            layer = SyncBatchNorm(3, process_group=group)
            backward = layer(torch.randn(4, 3, requires_grad=True)).sum()
            with pytest.raises(RuntimeError, match="the ranks are in different") as raised:
                backward.backward() if rank == 0 else layer(torch.randn(4, 3))
            for direction in ("backward", "forward"):
                assert f"{direction} of a SyncBatchNorm of 3 channels" in str(raised.value)
            if channel == "1":
                continue  # the group has failed
            x = torch.full((2, 3), float(rank))
            layer(x)  # nothing was exchanged, so the group still works
            wanted = torch.full((3,), (world - 1) / 2, dtype=torch.float64)
            again = SyncBatchNorm(3, momentum=1.0, process_group=group).double()
            again(x.double())
            torch.testing.assert_close(again.running_mean, wanted)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@on_ranks(2)
def test_sync_batch_norm_traced_in_training_synchronizes_over_the_ranks(
    rank: int, world: int
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), SyncBatchNorm(4))
    untraced = copy.deepcopy(model)
    torch.manual_seed(rank)
    # The process's first training forward is traced, and creates the communicator.
    syncbn_group._own_group = None  # an earlier test on these ranks may have created it
    traced = torch.jit.trace(model, torch.randn(5, 3), check_trace=False)
    model.load_state_dict(untraced.state_dict())
    for _ in range(2):
        x = torch.randn(5, 3)
        got, expected = traced(x), untraced(x)
        assert torch.equal(got, expected)
        got.pow(3).sum().backward()
        expected.pow(3).sum().backward()
    for param, other in zip(model.parameters(), untraced.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)
    for buffer, other in zip(model.buffers(), untraced.buffers(), strict=True):
        assert torch.equal(buffer, other)
    syncbn_group._own_group = None
    torch.export.export(model, (torch.randn(5, 3),))  # with fake tensors
