# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel over NCCL, several ranks on one GPU or on several, against float64, and
its launches in one process."""

from __future__ import annotations

import copy
import datetime
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batch_norm_program_run import run_programs
from batch_norm_programs import draw_program
from ddp_support import share_one_gpu
from sync_batch_norm_support import first_seed
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel, convert_syncbn_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.nccl,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL"),
]


def _rank_main(rank: int, world_size: int, path: str, body: Callable[..., None], args: Any) -> None:
    count = torch.cuda.device_count()
    if count < world_size:
        share_one_gpu(rank)
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{path}/group",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
        device_id=device,
    )
    try:
        body(rank, world_size, *args)
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()


def run_nccl_ranks(world_size: int, body: Callable[..., None], *args: Any) -> None:
    with tempfile.TemporaryDirectory() as path:
        mp.spawn(_rank_main, (world_size, path, body, args), nprocs=world_size)


def _mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Sequential(
        nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)
    )
    return layers.to(dtype)


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator, dtype=torch.float64)


def _assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"{what}: error {error:.3g}"


def _trains_like_one_process(rank: int, world_size: int, dtype: torch.dtype, options: dict) -> None:
    model = copy.deepcopy(_mlp()).to("cuda", dtype)
    if rank > 0:  # the constructor broadcasts rank 0's values
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    ddp = DistributedDataParallel(model, message_size=1000, **options)
    reference = _mlp(dtype).double()
    rows = 12 // world_size
    for step in range(4):
        batch = _batch(step)
        ddp.zero_grad(set_to_none=True)
        reference.zero_grad(set_to_none=True)
        mine = batch[rank * rows : (rank + 1) * rows].to("cuda", dtype)
        ddp(mine).float().square().mean().backward()
        reference(batch).square().mean().backward()
        for (name, got), want in zip(
            ddp.module.named_parameters(), reference.parameters(), strict=True
        ):
            _assert_near(got.grad, want.grad, 2e-5 if dtype == torch.float32 else 0.1, name)
        with torch.no_grad():
            for parameter, follower in zip(
                ddp.module.parameters(), reference.parameters(), strict=True
            ):
                parameter.sub_(parameter.grad, alpha=1e-3)
                follower.copy_(parameter)  # so that rounding does not accumulate
    in_backward = ddp.statistics()["launched_in_backward"]
    assert (in_backward == 0) if options.get("delay_allreduce") else (in_backward > 0)
    for name, parameter in ddp.module.named_parameters():
        everyone = [torch.empty_like(parameter) for _ in range(world_size)]
        group = options.get("process_group")
        dist.all_gather(everyone, parameter.detach().contiguous(), group=group)
        assert all(torch.equal(other, parameter) for other in everyone), f"{name} differs"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"delay_allreduce": True},
        {"num_allreduce_streams": 2},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=lambda options: next(iter(options), "default"),
)
def test_training_two_nccl_ranks_equals_one_process(options: dict) -> None:
    run_nccl_ranks(2, _trains_like_one_process, torch.float32, options)


@pytest.mark.parametrize("options", [{}, {"allreduce_always_fp32": True}], ids=["bf16", "fp32_sum"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_bfloat16_nccl_ranks_equals_one_process(world_size: int, options: dict) -> None:
    run_nccl_ranks(world_size, _trains_like_one_process, torch.bfloat16, options)


def _trains_in_a_subgroup(rank: int, world_size: int) -> None:
    group = dist.new_group(range(world_size - 1))
    if rank < world_size - 1:  # the last rank does not take part
        options = {"process_group": group}
        _trains_like_one_process(rank, world_size - 1, torch.float32, options)
    dist.barrier()


def test_training_in_a_subgroup_of_three_nccl_ranks_equals_one_process() -> None:
    run_nccl_ranks(3, _trains_in_a_subgroup)


class _Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3)))


def _random_batch_norms(rank: int, world_size: int, seed: int) -> None:
    with torch.device("cuda"):
        programs = [draw_program(seed + i, world_size) for i in range(40)]
        run_programs(rank, world_size, programs)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sync_batch_norm_random_cases_nccl_ranks_match_one_process(world_size: int) -> None:
    run_nccl_ranks(world_size, _random_batch_norms, first_seed())


def _replays(rank: int, world_size: int, views: bool) -> None:
    torch.manual_seed(3)
    reference = _Normalized().double()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    rows = 8 // world_size
    generator = torch.Generator().manual_seed(4)
    batches = [torch.randn(8, 3, 9, 9, generator=generator, dtype=torch.float64) for _ in range(6)]
    x = torch.empty(rows, 3, 9, 9, device="cuda", dtype=torch.float64)
    follower = torch.optim.SGD(reference.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        optimizer.step()

    with torch.cuda.stream(stream):
        model = convert_syncbn_model(copy.deepcopy(reference)).to("cuda", torch.float64)
        # Wrapped on a stream that can be captured, because gradients are accumulated on the stream
        # that was current when the hooks were created.
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches[:3]:  # records the plan
            x.copy_(batch[rank * rows : (rank + 1) * rows])
            step(ddp, x, optimizer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step(ddp, x, optimizer)
    for batch in batches[3:]:
        x.copy_(batch[rank * rows : (rank + 1) * rows])
        graph.replay()
    for batch in batches:
        step(reference, batch, follower)
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        _assert_near(got, want, 1e-9, name)
    _assert_near(model.norm.running_var, reference.norm.running_var, 1e-9, "running_var")
    assert ddp.statistics()["usage_reads"] == 0


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_step_captured_in_a_graph_two_nccl_ranks_equals_one_process(views: bool) -> None:
    """With SyncBatchNorm."""
    run_nccl_ranks(2, _replays, views)


# --- one rank per GPU, up to eight; two ranks on one GPU ---

RANKS = max(2, min(8, torch.cuda.device_count()))
DEVICE = "cuda"


def _norms_and_buckets(rank: int, world_size: int, seconds: float) -> None:
    """Batch norm uses a separate communicator while buckets are in flight."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)) for _ in range(20)]
    model = convert_syncbn_model(nn.Sequential(*layers)).to(DEVICE)
    ddp = DistributedDataParallel(model, message_size=5000)
    x = torch.randn(4, 16, 32, 32, device=DEVICE) + rank
    done, begin = torch.zeros(1, device=DEVICE), time.monotonic()
    while not done:
        for _ in range(50):
            ddp.zero_grad()
            ddp(x).square().mean().backward()
        done += time.monotonic() - begin > seconds
        dist.all_reduce(done)
    mine = torch.stack([p.grad.double().sum() for p in ddp.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    assert mine.isfinite().all() and all(torch.equal(other, mine) for other in everyone)


def test_batch_norms_beside_buckets_do_not_deadlock() -> None:
    seconds = float(os.environ.get("APEX_TEST_SECONDS", "20"))
    run_nccl_ranks(RANKS, _norms_and_buckets, seconds)


def _runs_out_of_memory(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(_mlp(torch.float32).to(DEVICE), on_failure="skip")
    for step in range(6):
        ddp.zero_grad()
        loss = ddp(_batch(step).to(DEVICE, torch.float32)).square().mean()
        if step == 3 and rank == 1:
            hook = [*ddp.parameters()][-2].register_hook(_exhaust)
        try:
            loss.backward()
        except torch.OutOfMemoryError:
            assert step == 3 and rank == 1
            hook.remove()
        assert step == 3 or all(p.grad is not None for p in ddp.parameters())
    assert ddp.statistics()["steps_skipped"] == 1


def _exhaust(gradient: Tensor) -> Tensor:
    return gradient + torch.empty(1 << 50, dtype=torch.uint8, device=gradient.device)


def test_rank_out_of_memory_costs_one_step() -> None:
    run_nccl_ranks(RANKS, _runs_out_of_memory)


# --- one process: launches, and no host synchronization ---

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpyAsync")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/group",
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=60),
        device_id=torch.device("cuda", 0),
    )
    yield
    dist.destroy_process_group()


def _chain(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers))).cuda()


def _stepper(module: nn.Module) -> Callable[[], None]:
    x = torch.randn(4, 16, device="cuda")

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(x).sum().backward()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step


def _launches(step: Callable[[], None]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.name in LAUNCHES for event in profile.events())


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_step_many_small_parameters_launches_by_bucket(group: None, views: bool) -> None:
    plain = _chain(100)  # 200 parameters
    alone = _launches(_stepper(plain))
    if alone == 0:
        pytest.skip("the profiler records no CUDA calls here")
    ddp = DistributedDataParallel(_chain(100), gradient_as_bucket_view=views)
    step = _stepper(ddp)
    before = ddp.statistics()
    added = _launches(step) - alone
    after = ddp.statistics()
    assert after["launched_in_backward"] - before["launched_in_backward"] == 1
    # One multi-tensor call handles tens of tensors per launch. One kernel per parameter would be
    # 200.
    assert added <= 30, f"{added} launches more than without the wrapper"


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_step_steady_state_never_waits_on_the_host(group: None, views: bool) -> None:
    ddp = DistributedDataParallel(_chain(20), gradient_as_bucket_view=views)
    step = _stepper(ddp)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()  # raises if anything waits for the GPU
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ddp.statistics()["usage_reads"] == 0


def test_step_views_with_gradients_kept_copies_nothing(group: None) -> None:
    model = _chain(20)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x = torch.randn(4, 16, device="cuda")
    for _ in range(3):
        ddp.zero_grad(set_to_none=False)
        ddp(x).sum().backward()
    before = ddp.statistics()["gradients_copied"]
    ddp.zero_grad(set_to_none=False)
    ddp(x).sum().backward()
    assert ddp.statistics()["gradients_copied"] == before
