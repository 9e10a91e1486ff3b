# SPDX-License-Identifier: BSD-3-Clause
"""``init_process_group("apex")``: the calls of torch.distributed and its users, over shared memory.

References: random programs of collectives, compared bitwise with values that each rank computes
(collective_programs.py); torch's classes over it, compared with one process in float64; time
limits.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_programs import run_programs
from ddp_models import Mlp, batch, make, mean_gradients
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_near,
    check_same_on_all_ranks,
    gradients,
    host_channel,
    on_ranks,
    raises,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex._internal.groups import timeout_of
from apex.parallel import DistributedDataParallel, create_syncbn_process_group
from apex.parallel.syncbn_group import default_group

pytestmark = pytest.mark.processes


def group(**options: Any) -> Any:
    options.setdefault("timeout", datetime.timedelta(seconds=20))
    return dist.new_group(backend="apex", **options)


@pytest.mark.parametrize("first", range(0, 120, 40))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_programs_have_the_bits_of_a_reference(
    ranks: RankPool, world: int, first: int
) -> None:
    ranks.run(world, run_programs, list(range(first, first + 40)))


@on_ranks(2)
def test_average_over_gloo_raises_if_the_other_rank_has_left(rank: int, world: int) -> None:
    with host_channel("0"):
        one = group()
    if rank == 1:
        dist.destroy_process_group(one)
        return
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        with raises(RuntimeError):
            dist.all_reduce(torch.ones(3), op, group=one)


@on_ranks(2)
def test_broadcast_from_no_rank_is_refused(rank: int, world: int) -> None:
    one = group()
    for root in (-1, 2):
        with raises(ValueError, f"invalid root rank: {root}"):
            dist.broadcast(torch.ones(3), group=one, group_src=root)


@on_ranks(2)
def test_ranks_without_shared_memory_go_by_gloo(rank: int, world: int) -> None:
    with host_channel("0"):
        one = group()
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor, group=one)
        check(torch.equal(tensor, torch.full((1000,), world * (world - 1) / 2)), "sum over Gloo")
        tensor.fill_(rank)
        work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=one, async_op=True)
        work.get_future().wait()
        check(torch.equal(tensor, torch.full((1000,), (world - 1) / 2)), "average over Gloo")
        outputs = [torch.empty(3) for _ in range(world)]
        dist.all_gather(outputs, torch.full((3,), float(rank)), group=one)
        check_equal([int(output[0]) for output in outputs], list(range(world)), "gathered")
        backend: Any = one._get_backend(torch.device("cpu"))
        check(not backend.supports_tensor_alloc(torch.device("cpu")), "allocates")


@on_ranks(2)
def test_collective_of_a_destroyed_group_completes(rank: int, world: int) -> None:
    one = group()
    work = dist.all_reduce(torch.ones(10), group=one, async_op=True)
    dist.destroy_process_group(one)
    check_equal(float(work.get_future().wait()[0][0]), float(world), "future")
    work.wait()
    whole = group()
    with raises(ValueError, "no average of Long"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG, group=whole)


@on_ranks(2)
def test_timeouts(rank: int, world: int) -> None:
    one = group()
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), group=one, async_op=True)
        with raises(RuntimeError, "not completed in time"):
            work.wait(datetime.timedelta(milliseconds=100))
        check(not work.is_completed(), "completed without the other ranks")
    dist.barrier()
    if rank != 0:
        work = dist.all_reduce(torch.ones(10), group=one, async_op=True)
    work.wait()  # the expired wait has changed nothing
    short = group(timeout=datetime.timedelta(milliseconds=300))
    if rank == 0:
        # Programs search for " timeout " in Gloo's errors.
        with raises(RuntimeError, "waited for rank 1 longer than the timeout of 300 ms"):
            dist.all_reduce(torch.ones(10), group=short)
        with raises(RuntimeError, "an earlier collective of this group failed"):
            dist.all_reduce(torch.ones(10), group=short)
    dist.barrier()


@on_ranks(2)
def test_different_collectives_are_named(rank: int, world: int) -> None:
    one = group()
    with raises(RuntimeError, "the ranks are in different collectives"):
        if rank == 0:
            dist.all_reduce(torch.ones(10), group=one)
        else:
            dist.broadcast(torch.ones(10), 0, group=one)
    two = group()
    with raises(RuntimeError, "elements of Float"):
        dist.all_reduce(torch.ones(10 + rank), group=two)


@pytest.mark.parametrize("channel", ["1", "0"])
@on_ranks(2)
def test_wrong_arguments_raise_before_anything_is_sent(rank: int, world: int, channel: str) -> None:
    """Hazard: Gloo sums the first elements of the storage for those of a tensor with gaps."""
    with host_channel(channel):
        one = group()
    gaps, two = torch.ones(4)[::2], torch.ones(2)
    calls: list[tuple[Any, str]] = [
        (lambda: dist.all_gather([torch.empty(3)], torch.ones(3), group=one), "a list of 1"),
        (lambda: dist.all_reduce(torch.ones(3, 2).t(), group=one), "must be contiguous"),
        (lambda: dist.all_reduce(gaps, group=one), "must be contiguous"),
        (lambda: dist.broadcast(gaps, 0, group=one), "must be contiguous"),
        (lambda: dist.all_gather([two, gaps], two, group=one), "must be contiguous"),
        (lambda: dist.reduce_scatter(gaps, [two, two], group=one), "must be contiguous"),
    ]
    if channel == "1":
        three = torch.ones(3)
        calls += [
            (lambda: dist.all_gather_into_tensor(torch.empty(5), three, group=one), "5 elem"),
            (lambda: dist.reduce_scatter_tensor(torch.empty(2), three, group=one), "3 elements"),
        ]
    for call, fragment in calls:
        with raises((ValueError, RuntimeError), fragment):  # type: ignore[arg-type]
            call()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=one)  # nothing was sent
    check_equal(float(tensor[0]), float(world), "after errors")


@on_ranks(3, lost=(1,))
def test_killed_rank_is_named_at_once(rank: int, world: int) -> None:
    one = group()
    dist.all_reduce(torch.ones(3), group=one)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(RuntimeError, "rank 1", "has ended"):
        dist.all_reduce(torch.ones(100_000), group=one)
    with raises(RuntimeError, "rank 1"):
        dist.all_reduce(torch.ones(3), group=one, async_op=True).get_future().wait()


@on_ranks(3)
def test_rank_that_has_left_is_named_at_once(rank: int, world: int) -> None:
    """Rank 1 leaves while it holds a completed Work. The others are notified immediately."""
    one = group(timeout=datetime.timedelta(minutes=10))
    work = dist.all_reduce(torch.ones(30_000), group=one, async_op=True)
    work.wait()
    if rank == 1:
        dist.destroy_process_group(one)
    else:
        with raises(RuntimeError, "rank 1 has left the group"):
            dist.all_reduce(torch.ones(3), group=one)
    dist.barrier()  # rank 1 holds it until then
    check(work.is_completed(), "what has completed stays so")


@on_ranks(2)
def test_many_collectives_in_another_order_complete(rank: int, world: int) -> None:
    """Many collectives in flight, from two groups."""
    groups = [group(), group()]
    works, tensors = [], []
    for one in groups if rank == 0 else groups[::-1]:
        for i in range(300):
            tensors.append(torch.full((3,), float(i)))
            works.append(dist.all_reduce(tensors[-1], group=one, async_op=True))
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        check_equal(float(tensor[0]), float(i % 300 * world), f"number {i}")


@on_ranks(2)
def test_collective_goes_on_while_its_rank_waits_for_something_else(rank: int, world: int) -> None:
    one, store = group(), dist.distributed_c10d._get_default_store()
    for i in range(3):
        issued, summed = (f"{one.group_name} {i} {what}" for what in ("issued", "summed"))
        if rank == 1:
            store.wait([issued])
        work = dist.all_reduce(torch.ones(1 << 20), group=one, async_op=True)
        if rank == 0:
            store.set(issued, "")
            store.wait([summed])  # rank 1 has all parts of the sum, also that of this rank
        work.wait()
        store.set(summed, "")


def _groups_of_a_world(rank: int, world: int, store: str) -> None:
    """Groups that this package creates have the apex world's timeout. Streams create none."""
    dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=7)
    dist.init_process_group(
        "apex", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
    )
    for made in (default_group(), create_syncbn_process_group(2), create_syncbn_process_group(1)):
        check_equal(timeout_of(made), timeout, "the timeout")
    others = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    for ranks, one in zip(([0, 1], [0, 2]), others, strict=True):
        if rank in ranks:  # ranks have created different numbers of groups
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ddp = DistributedDataParallel(
                    Mlp(), process_group=one, num_allreduce_streams=2, message_size=20
                )
            ddp(batch(rank, 0)).sum().backward()


def test_groups_that_are_made_in_an_apex_world(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, _groups_of_a_world, str(tmp_path / "store"))


@on_ranks(2)
def test_destroyed_groups_leave_nothing(rank: int, world: int) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for i in range(20):
        one = group()
        work = dist.all_reduce(torch.ones(100_000), group=one, async_op=True)
        if i % 2:
            work.get_future()
        work.wait()
        dist.destroy_process_group(one)
        del one, work
    dist.barrier()
    for _ in range(200):  # groups end on separate threads
        left = len(os.listdir("/proc/self/fd")) - files
        if left < 10:
            break
        time.sleep(0.05)
    check(left < 10, f"{left} descriptors more than before")
    check_equal(threading.active_count(), threads, "threads of Python")


@on_ranks(2)
def test_shutdown_while_another_thread_issues(rank: int, world: int) -> None:
    for _ in range(20):
        one = group()
        backend: Any = one._get_backend(torch.device("cpu"))
        issued = threading.Event()

        def issue(backend: Any = backend, issued: threading.Event = issued) -> None:
            with contextlib.suppress(RuntimeError):  # of a group that was shut down
                while True:
                    backend.allreduce([torch.ones(1)])
                    issued.set()

        threads = [threading.Thread(target=issue) for _ in range(2)]
        for thread in threads:
            thread.start()
        issued.wait()
        one.shutdown()
        for thread in threads:
            thread.join(30)
            check(not thread.is_alive(), "the thread ends")


HOOKS: dict[str, Any] = {
    "none": None,
    "allreduce": (default_hooks.allreduce_hook, None),
    "powerSGD": (powerSGD_hook.powerSGD_hook, "state"),
}


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}],
                         ids=["plain", "views"])  # fmt: skip
@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(3)
def test_torch_ddp_trains_on_it(rank: int, world: int, hook: str, options: dict[str, Any]) -> None:
    one = group()
    ddp = TorchDDP(make(seed=rank), process_group=one, bucket_cap_mb=0.001, **options)
    if hook == "powerSGD":
        state = powerSGD_hook.PowerSGDState(one, start_powerSGD_iter=1000)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook != "none":
        ddp.register_comm_hook(one, HOOKS[hook][0])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        expected = mean_gradients(ddp.module, world, step)
        ddp(batch(rank, step)).square().sum().backward()
        for name, grad in gradients(ddp.module).items():
            check_near(grad, expected[name], name, 1e-5)
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"gradients, {step}")
        optimizer.step()


@on_ranks(2)
def test_fsdp_and_dtensor_work_on_it(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    one = group()
    mesh = DeviceMesh.from_group(one, "cpu", mesh=torch.arange(world))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    sharded = copy.deepcopy(plain)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, sharded)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sharded(batch(rank, step)).square().sum().backward()
        for r in range(world):
            (plain(batch(r, step)).square().sum() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        check(isinstance(mine, DTensor), "sharded")
        check_near(mine.full_tensor().detach(), other.detach(), "parameter", 1e-4)
    tensor = torch.arange(12.0).view(4, 3)
    parts: Any = distribute_tensor(tensor, mesh, [Shard(0)])
    check(torch.equal((parts * 2).full_tensor(), tensor * 2), "DTensor")


def test_torch_tests_run_on_it() -> None:
    """Some of the tests of torch_distributed_tests.py."""
    pytest.importorskip("expecttest", reason="torch's own tests need it")
    runner = Path(__file__).with_name("torch_distributed_tests.py")
    some = (
        "test_all_reduce_coalesced_sum",
        "test_all_reduce_sum",
        "test_barrier_timeout_full_group",
        "test_gather",
        "test_isend_torch_profiler",
        "test_reduce_sum",
        "test_scatter",
    )
    done = subprocess.run(
        [sys.executable, str(runner), *some], capture_output=True, text=True, timeout=300
    )
    check_equal(done.stdout.splitlines()[-1:], ["7 passed"], done.stdout + done.stderr[-4000:])
