# SPDX-License-Identifier: BSD-3-Clause
"""Latency and bandwidth of all-reduces, and of messages between two ranks.

Every rank of a group runs the same number of repetitions, which the slowest rank determines. A rank
with one more repetition would wait for the others indefinitely.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from apex._doctor.pairs import Pair, Ranks

LATENCY_BYTES = 4 << 10
BANDWIDTH_BYTES = 32 << 20
MESSAGE_BYTES = 4 << 20
#: The time limit for the repetitions of one measurement.
BUDGET_S = 0.3


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of float32 tensors, measured on one rank.

    Attributes:
        latency_s: the median time for LATENCY_BYTES.
        bytes_per_s: BANDWIDTH_BYTES divided by their median time. This is the size of the tensor,
            not the number of bytes sent.
        shares_memory: whether the backend `apex` uses shared memory; None for other backends.
    """

    backend: str
    latency_s: float
    bytes_per_s: float
    shares_memory: bool | None = None


def all_reduce(backend: str, device: torch.device, timeout_s: float) -> AllReduce:
    """Create a group of all ranks with ``backend`` and measure it.

    Collective over the default group, which must be a Gloo group. Blocks.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    # None for NCCL, because torch ends the process when NCCL's timeout expires.
    group = dist.new_group(backend=backend, timeout=None if backend == "nccl" else timeout)
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # establishes the connections
    medians = []
    for size in (LATENCY_BYTES, BANDWIDTH_BYTES):
        tensor = torch.zeros(size // 4, device=device)
        medians.append(_median_s(partial(dist.all_reduce, tensor, group=group), device))
    shares_memory = None
    if backend == "apex":
        apex_backend: Any = group._get_backend(device)
        shares_memory = bool(apex_backend.supports_tensor_alloc(device))
    dist.destroy_process_group(group)
    return AllReduce(backend, medians[0], BANDWIDTH_BYTES / medians[1], shares_memory)


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    def timed() -> float:
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    # The first call is not counted, because it touches the memory for the first time.
    slowest = torch.tensor([timed()], dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(timed() for _ in range(_repetitions(float(slowest), 300)))


def _repetitions(one_s: float, most: int) -> int:
    return min(most, max(1, int(BUDGET_S / max(one_s, 1e-9))))


def pair(ranks: Ranks) -> Pair:
    """Time messages in both directions between this rank and the other rank of ``ranks``, over
    Gloo.

    Blocks, at most for the timeout of the default group.
    """
    is_first = dist.get_rank() == ranks[0]
    other = ranks[1] if is_first else ranks[0]

    def one_way_s(message: torch.Tensor) -> float:
        begin = time.perf_counter()
        for sends in (is_first, not is_first):
            if sends:
                dist.send(message, other)
            else:
                dist.recv(message, other)
        return (time.perf_counter() - begin) / 2

    def times_s(size: int, most: int) -> list[float]:
        message = torch.zeros(size // 4, device="cpu")
        count = torch.tensor([_repetitions(2 * one_way_s(message), most)], device="cpu")
        if is_first:
            dist.send(count, other)
        else:
            dist.recv(count, other)
        return sorted(one_way_s(message) for _ in range(int(count)))

    small = times_s(8, 200)
    # Where other programs share the cores, the median would measure the scheduler instead.
    latency_s = small[len(small) // 10]
    return Pair(ranks, latency_s, MESSAGE_BYTES / statistics.median(times_s(MESSAGE_BYTES, 20)))
