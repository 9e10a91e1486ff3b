# SPDX-License-Identifier: BSD-3-Clause
"""What is seen of training: non-finite gradients, profiler ranges, times, and what another thread
reads."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
from ddp_models import backward, batch, build, data, make
from ddp_support import check, check_equal, check_near, check_same_on_all_ranks, on_ranks, raises
from torch import nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


@on_ranks(1)
def test_properties_that_another_thread_polls_do_not_stop_training(rank: int, world: int) -> None:
    """Hazard: a property waits for the reducer with the GIL, and the reducer for the GIL."""
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    norms: dict[Any, Any] = {}
    for p in net.parameters():  # which makes a Python object of the gradient
        p.register_post_accumulate_grad_hook(lambda p: norms.__setitem__(p, p.grad.norm()))
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            _ = ddp.total_weight, ddp.step_skipped

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(500):
            ddp.zero_grad()
            ddp(torch.ones(2, 8)).sum().backward()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("options", [{}, {"message_size": 1}, {"gradient_as_bucket_view": True}],
                         ids=["one_bucket", "alone", "views"])  # fmt: skip
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@on_ranks(3)
def test_check_finite_names_rank_and_parameter(
    rank: int, world: int, value: float, options: dict[str, Any]
) -> None:
    ddp = DistributedDataParallel(make(), check_finite=True, **options)
    for step in range(4):
        ddp.zero_grad()
        output = ddp(batch(rank, step))
        bad = step == 2 and rank > 0
        if bad:
            ddp.module.b.weight.register_hook(lambda grad: torch.full_like(grad, value))
        said = (
            "rank 1 contributed a gradient that is infinite or NaN for parameter 'b.weight' "
            f"({world - 1} of {world} ranks"
        )
        with raises(RuntimeError, said) if step == 2 else contextlib.nullcontext():
            output.square().sum().backward()
        if bad:
            ddp.module.b.weight._backward_hooks.clear()
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], "afterwards")


@on_ranks(2)
def test_check_finite_finds_what_a_parameter_outside_of_the_plan_has(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(), check_finite=True)
    for _ in range(2):
        ddp(data(rank), [0, 1]).sum().backward()
        ddp.zero_grad()
    if rank == 1:
        ddp.module.layers[2].weight.register_hook(lambda grad: grad * float("inf"))
    said = "rank 1 contributed a gradient that is infinite or NaN for parameter 'layers.2.weight'"
    with raises(RuntimeError, said):
        ddp(data(rank), [0, 1, 2]).sum().backward()


@on_ranks(2)
def test_check_finite_takes_values_whose_sum_overflows(rank: int, world: int) -> None:
    """Hazard: a bucket's sum, which decides where to look, is infinite although no value is."""
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3), check_finite=True)
    ddp.module.weight.register_hook(lambda grad: torch.full_like(grad, 3e38 * rank))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(2, 3)).sum().backward()
    check_near(ddp.module.weight.grad, torch.full((3, 3), 1.5e38), "average", 1e33)


@on_ranks(2)
def test_profiler_shows_forward_buckets_and_end(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make(), prof=True, message_size=30)
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ddp.zero_grad()
            backward(ddp, rank, 0)
    counts = {event.key: event.count for event in profile.key_averages()}
    check_equal(counts.get("apex.DistributedDataParallel.forward"), 1, "forward")
    buckets = len(ddp._reducer.plan())
    check(buckets > 1, "one bucket")
    check_equal(counts.get("apex::reducer::launch_bucket"), buckets, "launches")
    check_equal(counts.get("apex::reducer::finish_backward"), 1, "ends of backward")


@on_ranks(2)
def test_statistics_have_the_times_of_the_last_step(rank: int, world: int) -> None:
    """Oracle: a sleep of rank 1 in backward, for which rank 0 waits."""
    ddp = DistributedDataParallel(make())
    x = batch(rank, 0).requires_grad_()
    check_equal(ddp.statistics()["last_step_compute_s"], 0, "before the first step")
    for step in range(3):
        ddp.zero_grad()
        y = ddp(x)
        if rank == 1 and step == 2:
            ddp.module.register_full_backward_hook(lambda *_: time.sleep(0.1))
            y = ddp(x)
        y.square().sum().backward()
    times = ddp.statistics()
    check(rank == 0 or times["last_step_compute_s"] >= 0.1, f"own time: {times}")
    check(rank == 1 or times["last_backward_wait_s"] > 0, f"waits: {times}")
