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
from ddp_models import Mlp
from ddp_steps_support import batch, make, mean_gradients
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_near,
    check_same_on_all_ranks,
    gradients,
    host_channel,
    raises,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex._internal.groups import timeout_of
from apex.parallel import DistributedDataParallel, SyncBatchNorm, create_syncbn_process_group
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


def _without_memory(rank: int, world: int) -> None:
    with host_channel("0"):
        one = group()
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor, group=one)
        check(torch.equal(tensor, torch.full((1000,), world * (world - 1) / 2)), "sum over Gloo")
        dist.all_reduce(tensor.fill_(rank), dist.ReduceOp.AVG, group=one)
        check(torch.equal(tensor, torch.full((1000,), (world - 1) / 2)), "average over Gloo")
        outputs = [torch.empty(3) for _ in range(world)]
        dist.all_gather(outputs, torch.full((3,), float(rank)), group=one)
        check_equal([int(output[0]) for output in outputs], list(range(world)), "gathered")
        backend: Any = one._get_backend(torch.device("cpu"))
        check(not backend.supports_tensor_alloc(torch.device("cpu")), "allocates")


def test_ranks_without_shared_memory_go_by_gloo(ranks: RankPool) -> None:
    ranks.run(2, _without_memory)


def _names(rank: int, world: int) -> None:
    one = group()
    check_equal(dist.get_backend(one), "apex", "name")
    backend: Any = one._get_backend(torch.device("cpu"))
    check_equal(backend.name(), "apex", "name of the backend")
    check(backend.supports_splitting, "splits")
    tensor = backend.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
    check_equal((tensor.numel(), float(tensor.sum())), (1000, 0.0), "allocated")
    tensor.fill_(rank)
    dist.all_reduce(tensor, group=one)
    check_equal(float(tensor[0]), world * (world - 1) / 2, "sum in its memory")


def test_backend_says_what_it_is_and_has(ranks: RankPool) -> None:
    ranks.run(2, _names)


def _works(rank: int, world: int) -> None:
    one = group()
    tensors = [torch.full((10 ** (i % 6),), float(rank + i)) for i in range(30)]
    works = [dist.all_reduce(tensor, group=one, async_op=True) for tensor in tensors]
    for i, work in reversed(list(enumerate(works))):
        check(work.wait(), "wait()")
        check(work.is_completed() and work.is_success(), "completed")
        check(work.exception() is None, "exception()")
        check_equal(float(tensors[i][-1]), world * i + world * (world - 1) / 2, f"sum {i}")
    seen: list[tuple[int, float]] = []
    futures = []
    for i in range(10):
        future = dist.all_reduce(torch.full((i + 1,), 1.0), group=one, async_op=True).get_future()
        check(future is not None, "future")
        futures.append(future.then(lambda f, i=i: seen.append((i, float(f.value()[0].sum())))))
    for future in futures:
        future.wait()
    check_equal(sorted(seen), [(i, float(world * (i + 1))) for i in range(10)], "futures")
    late = dist.all_reduce(torch.ones(3), group=one, async_op=True)
    late.wait()
    check_equal(float(late.get_future().wait()[0][0]), float(world), "future of a completed one")
    check_equal(float(late.result()[0][0]), float(world), "result()")


def test_works_and_futures_complete_in_any_order(ranks: RankPool) -> None:
    ranks.run(3, _works)


def _nested(rank: int, world: int) -> None:
    one = group()

    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        work = dist.all_reduce(future.value()[0], group=one, async_op=True)
        return work.get_future().wait()[0]

    for _ in range(3):
        tensor = torch.ones(10)
        if rank == 1:
            time.sleep(0.2)  # so that the others' callbacks run on the futures' thread
        futures = [
            dist.all_reduce(tensor.clone(), group=one, async_op=True).get_future().then(again)
            for _ in range(1)
        ]
        for future in futures:
            check_equal(float(future.wait()[0]), float(world * world), "sum of sums")


def test_callback_that_waits_for_another_future_goes_on(ranks: RankPool) -> None:
    ranks.run(2, _nested)


def _late_future(rank: int, world: int) -> None:
    one = group()
    work = dist.all_reduce(torch.ones(10), group=one, async_op=True)
    dist.destroy_process_group(one)
    with raises(RuntimeError, "destroyed"):
        work.get_future()
    work.wait()
    check_equal(float(work.get_future().wait()[0][0]), float(world), "future after the wait")
    whole = group()
    with raises(ValueError, "no average of Long"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG, group=whole)


def test_future_of_a_destroyed_group_is_refused(ranks: RankPool) -> None:
    ranks.run(2, _late_future)


def _timeouts(rank: int, world: int) -> None:
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


def test_timeouts(ranks: RankPool) -> None:
    ranks.run(2, _timeouts)


def _dropped(rank: int, world: int) -> None:
    for memory in ("1", "0"):
        with host_channel(memory):
            one = group()
            tensor = torch.full((1000, 300), float(rank))
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=one, async_op=True)
            dist.barrier(one, async_op=True)  # dropped too, with the remains of the first one
            dist.barrier(one)
            check(torch.equal(tensor, torch.full_like(tensor, (world - 1) / 2)), "average")
            # Hazard: each of them could keep all previous ones alive.
            many = [torch.full((2, 6), float(rank)) for _ in range(3000)]
            for tensor in many:
                dist.all_reduce(tensor, dist.ReduceOp.AVG, group=one, async_op=True)
            dist.barrier(one)
            check(all(float(tensor[0, 0]) == (world - 1) / 2 for tensor in many), "averages")
    one = group()
    outputs = [torch.empty(300, 1000) for _ in range(world)]
    dist.all_gather(outputs, torch.full((300, 1000), float(rank)), group=one, async_op=True)
    dist.barrier(one)
    check_equal([float(output.mean()) for output in outputs], list(range(world)), "gathered")


def _by_gloo(rank: int, world: int) -> None:
    one = group()
    tensors = [torch.full((4,), 1.0 + rank), torch.full((2, 3), 2.0)]
    dist.all_reduce_coalesced(tensors, group=one)
    check_equal(
        [float(t[-1].max()) for t in tensors], [world * (world + 1) / 2, 2.0 * world], "sums"
    )
    sizes = [r + 1 for r in range(world)]
    received = torch.empty(sizes[rank])
    dist.reduce_scatter(received, [torch.full((size,), 1.0 + rank) for size in sizes], group=one)
    check(bool(received.eq(sum(1.0 + r for r in range(world))).all()), "shares of other sizes")


def test_coalesced_and_uneven_collectives_go_by_gloo(ranks: RankPool) -> None:
    ranks.run(2, _by_gloo)


@pytest.mark.parametrize("world", [2, 3])
def test_dropped_works_write_their_result_before_the_next_has_completed(
    ranks: RankPool, world: int
) -> None:
    ranks.run(world, _dropped)


def _apart(rank: int, world: int) -> None:
    one = group()
    with raises(RuntimeError, "the ranks are in different collectives"):
        if rank == 0:
            dist.all_reduce(torch.ones(10), group=one)
        else:
            dist.broadcast(torch.ones(10), 0, group=one)
    two = group()
    with raises(RuntimeError, "elements of Float"):
        dist.all_reduce(torch.ones(10 + rank), group=two)


def test_different_collectives_are_named(ranks: RankPool) -> None:
    ranks.run(2, _apart)


def _wrong(rank: int, world: int) -> None:
    one = group()
    for call, fragment in (
        (lambda: dist.all_gather([torch.empty(3)], torch.ones(3), group=one), "a list of 1"),
        (lambda: dist.all_gather_into_tensor(torch.empty(5), torch.ones(3), group=one), "5 elem"),
        (lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 1], group=one), "split"),
        (
            lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(3), group=one),
            "3 elements",
        ),
        (lambda: dist.all_reduce(torch.ones(3, 2).t(), group=one), "must be contiguous"),
        (lambda: dist.broadcast(torch.ones(4)[::2], 0, group=one), "must be contiguous"),
    ):
        with raises((ValueError, RuntimeError), fragment):  # type: ignore[arg-type]
            call()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=one)  # nothing was sent
    check_equal(float(tensor[0]), float(world), "after errors")


def test_wrong_arguments_raise_before_anything_is_sent(ranks: RankPool) -> None:
    ranks.run(2, _wrong)


def _killed(rank: int, world: int) -> None:
    one = group()
    dist.all_reduce(torch.ones(3), group=one)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(RuntimeError, "rank 1", "has ended"):
        dist.all_reduce(torch.ones(100_000), group=one)
    with raises(RuntimeError, "rank 1"):
        dist.all_reduce(torch.ones(3), group=one, async_op=True).get_future().wait()


def test_killed_rank_is_named_at_once(ranks: RankPool) -> None:
    ranks.run(3, _killed, lost=(1,))


def _left(rank: int, world: int) -> None:
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


def test_rank_that_has_left_is_named_at_once(ranks: RankPool) -> None:
    ranks.run(3, _left)


def _all_to_all_apart(rank: int, world: int) -> None:
    """Rank 0 sends one row more to rank 1 than rank 1 expects."""
    one = group()
    sent = [1, 2] if rank == 0 else [1, 1]
    received = torch.empty(2)
    with raises(RuntimeError, "expects" if rank == 1 else ""):
        dist.all_to_all_single(received, torch.ones(sum(sent)), [1, 1], sent, group=one)
        dist.barrier(group=one)
    two = group()
    with raises(ValueError, "a negative split size, -1"):
        dist.all_to_all_single(torch.empty(2), torch.ones(2), [3, -1], [1, 1], group=two)


def test_all_to_all_of_other_sizes_ends_the_group(ranks: RankPool) -> None:
    ranks.run(2, _all_to_all_apart)


def _many_in_another_order(rank: int, world: int) -> None:
    """More collectives than the channel's ring has slots, from two wrappers and two groups."""
    groups = [group(), group()]
    works, tensors = [], []
    for one in groups if rank == 0 else groups[::-1]:
        for i in range(300):
            tensors.append(torch.full((3,), float(i)))
            works.append(dist.all_reduce(tensors[-1], group=one, async_op=True))
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        check_equal(float(tensor[0]), float(i % 300 * world), f"number {i}")
    wrappers = [
        DistributedDataParallel(
            nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(300)]),
            process_group=one,
            message_size=1,
        )
        for one in groups
    ]
    for _ in range(2):
        for wrapper in wrappers:
            wrapper.zero_grad()
        outputs = [wrapper(torch.ones(1, 2)).sum() for wrapper in wrappers]
        (outputs[rank % 2] + outputs[1 - rank % 2]).backward()
    for wrapper in wrappers:
        check_same_on_all_ranks([p.grad for p in wrapper.parameters()], "gradients")


def test_many_collectives_in_another_order_complete(ranks: RankPool) -> None:
    ranks.run(2, _many_in_another_order)


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


def _forked(rank: int, world: int) -> None:
    """A forked child of rank 0 that runs a SyncBatchNorm is refused, and does not act as a rank."""
    layer = SyncBatchNorm(3)
    if rank == 0:
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    layer(torch.randn(4, 3))
                except RuntimeError as error:
                    status = 0 if "was forked" in str(error) else 2
            os._exit(status)
        check_equal(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0, "of the child")
    check(bool(layer(torch.randn(4, 3)).isfinite().all()), "the rank itself")


def test_forked_child_takes_no_part_in_batch_norm(ranks: RankPool) -> None:
    ranks.run(2, _forked)


def _destroyed(rank: int, world: int) -> None:
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


def test_destroyed_groups_leave_nothing(ranks: RankPool) -> None:
    ranks.run(2, _destroyed)


def _shut_down_while_issuing(rank: int, world: int) -> None:
    for _ in range(20):
        one = group()
        backend: Any = one._get_backend(torch.device("cpu"))
        issued, over = threading.Event(), threading.Event()

        def issue(
            backend: Any = backend, issued: threading.Event = issued, over: threading.Event = over
        ) -> None:
            values = [torch.ones(1)]
            while not over.is_set():
                with contextlib.suppress(RuntimeError):
                    backend.allreduce(values)
                    issued.set()

        threads = [threading.Thread(target=issue) for _ in range(2)]
        for thread in threads:
            thread.start()
        issued.wait()
        time.sleep(0.01)
        one.shutdown()
        time.sleep(0.01)
        over.set()
        for thread in threads:
            thread.join(30)
            check(not thread.is_alive(), "the thread ends")


def test_shutdown_while_another_thread_issues(ranks: RankPool) -> None:
    ranks.run(2, _shut_down_while_issuing)


def _split(rank: int, world: int) -> None:
    one = group()
    parent: Any = one
    ours = [[0, 2], [1]] if world == 3 else [[0], [1]]
    backend = parent._get_backend(torch.device("cpu"))
    check(backend.supports_splitting, "splits")
    for members in ours:
        sub = dist.new_group(members, backend="apex")
        if rank in members:
            tensor = torch.full((3,), float(rank))
            dist.all_reduce(tensor, group=sub)
            check_equal(float(tensor[0]), float(sum(members)), f"sum over {members}")


def test_groups_of_some_ranks(ranks: RankPool) -> None:
    ranks.run(3, _split)


HOOKS: dict[str, Any] = {
    "none": None,
    "allreduce": (default_hooks.allreduce_hook, None),
    "powerSGD": (powerSGD_hook.powerSGD_hook, "state"),
}


def _torch_ddp(rank: int, world: int, hook: str, options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}],
                         ids=["plain", "views"])  # fmt: skip
@pytest.mark.parametrize("hook", HOOKS)
def test_torch_ddp_trains_on_it(ranks: RankPool, hook: str, options: dict[str, Any]) -> None:
    ranks.run(3, _torch_ddp, hook, options)


def _zero(rank: int, world: int) -> None:
    one = group()
    torch.manual_seed(0)
    plain = Mlp()
    ddp = TorchDDP(copy.deepcopy(plain), process_group=one)
    sharded = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, lr=0.01, process_group=one
    )
    whole = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(4):
        sharded.zero_grad()
        whole.zero_grad()
        ddp(batch(rank, step)).square().sum().backward()
        for r in range(world):
            (plain(batch(r, step)).square().sum() / world).backward()
        sharded.step()
        whole.step()
    for mine, other in zip(ddp.module.parameters(), plain.parameters(), strict=True):
        check_near(mine.detach(), other.detach(), "parameter", 1e-4)
    check_same_on_all_ranks(list(ddp.parameters()), "parameters")


def test_zero_redundancy_optimizer_trains_on_it(ranks: RankPool) -> None:
    ranks.run(2, _zero)


def _fsdp(rank: int, world: int) -> None:
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


def test_fsdp_and_dtensor_work_on_it(ranks: RankPool) -> None:
    ranks.run(2, _fsdp)


def _own_wrapper(rank: int, world: int) -> None:
    one = group()
    ddp = DistributedDataParallel(make(seed=rank), process_group=one)
    for step in range(4):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, world, step)
        ddp(batch(rank, step)).square().sum().backward()
        for name, grad in gradients(ddp.module).items():
            check_near(grad, expected[name], name, 1e-5)
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"gradients, {step}")
    check(ddp.statistics()["reduced_in_shared_memory"] > 0, "not in shared memory")


def test_own_wrapper_trains_on_it(ranks: RankPool) -> None:
    ranks.run(2, _own_wrapper)


def _late(rank: int, world: int) -> None:
    one = group()
    tensor = torch.full((1 << 20,), float(rank))
    if rank == 1:
        work = dist.all_reduce(tensor, group=one, async_op=True)
        dist.barrier()
    else:
        dist.barrier()  # the other rank has posted by now, and does no work for it
        work = dist.all_reduce(tensor, group=one, async_op=True)
    work.wait()
    check(torch.equal(tensor, torch.full((1 << 20,), 1.0)), "sum")


def test_rank_that_has_posted_is_not_waited_for(ranks: RankPool) -> None:
    ranks.run(2, _late)


def _stopped(rank: int, world: int) -> Tensor:
    one = group()
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid(), group=one)
    tensor = torch.full((300_000,), float(rank))
    works = [dist.all_reduce(tensor.clone(), group=one, async_op=True) for _ in range(5)]
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pids[1], signal.SIGCONT)).start()
    for work in works:
        work.wait()
    dist.all_reduce(tensor, group=one)
    return tensor[:1]


def test_torch_tests_run_on_it() -> None:
    """Some of the tests of torch_distributed_tests.py."""
    pytest.importorskip("expecttest", reason="torch's own tests need it")
    runner = Path(__file__).with_name("torch_distributed_tests.py")
    some = ("test_all_reduce_sum", "test_barrier_timeout_full_group", "test_isend_torch_profiler")
    done = subprocess.run(
        [sys.executable, str(runner), *some], capture_output=True, text=True, timeout=300
    )
    check_equal(done.stdout.splitlines()[-1:], ["3 passed"], done.stdout + done.stderr[-4000:])


def test_stopped_rank_only_delays(ranks: RankPool) -> None:
    for result in ranks.run(2, _stopped):
        assert float(result) == 1.0
