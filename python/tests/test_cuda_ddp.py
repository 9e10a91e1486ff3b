# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel on CUDA in one process: its launches, and no host synchronization."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.nccl,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL"),
]

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


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_step_captured_in_a_graph_replays_like_the_plain_loop(group: None, views: bool) -> None:
    torch.manual_seed(5)
    reference = _chain(5)
    follower = torch.optim.SGD(reference.parameters(), lr=0.1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    x = torch.zeros(4, 16, device="cuda")
    with torch.cuda.stream(stream):
        # Wrapped on a stream that can be captured, because gradients are accumulated on the stream
        # that was current when the hooks were created.
        ddp = DistributedDataParallel(copy.deepcopy(reference), gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def step(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            model(batch).square().mean().backward()
            optimizer.step()

        warm_up = [torch.randn(4, 16, device="cuda") for _ in range(4)]
        for batch in warm_up:  # records the plan
            step(ddp, batch, optimizer)
    torch.cuda.synchronize()
    for batch in warm_up:
        step(reference, batch, follower)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step(ddp, x, optimizer)
    reads = ddp.statistics()["usage_reads"]
    for _ in range(3):
        batch = torch.randn(4, 16, device="cuda")
        x.copy_(batch)
        graph.replay()
        step(reference, batch, follower)
    assert reads == 0
    for (name, got), want in zip(
        ddp.module.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(got, want, msg=name)
