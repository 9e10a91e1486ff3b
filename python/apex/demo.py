# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.demo`` trains with two processes on this host and injects faults into rank 1.

The demo takes about ten seconds, needs no GPU and writes no files. It shows what rank 0 reports
when rank 1 is late, and when it is killed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

STALL_S = 2.0
STEPS = 20


class Slow:
    """A gradient hook that sleeps, and so delays backward."""

    seconds = 0.0

    def __call__(self, grad: Tensor) -> None:
        time.sleep(self.seconds)


def _train(model: DistributedDataParallel, steps: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(64, 256, device="cpu")).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - begin) / steps


def _chapter(rank: int, title: str) -> None:
    dist.barrier()
    if rank == 0:
        print(f"\n--- {title} ---", flush=True)


def _run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store, timeout, world_size=2, rank=rank)
    middle, slow = nn.Linear(256, 256), Slow()
    middle.weight.register_hook(slow)
    layers = [nn.Linear(256, 256), nn.ReLU(), middle, nn.ReLU(), nn.Linear(256, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
    _chapter(rank, "two processes train")
    seconds = _train(model, STEPS)
    if rank == 0:
        print(f"{seconds * 1e3:.1f} ms a step", flush=True)
    _chapter(rank, f"rank 1 is late: reported after {STALL_S:g} s (default: 10)")
    slow.seconds = 2 * STALL_S if rank == 1 else 0
    _train(model, 1)
    slow.seconds = 0
    _chapter(rank, "rank 1 is killed: the error of rank 0")
    began = time.perf_counter()
    try:
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        _train(model, 1)
    except RuntimeError as error:
        print(f"after {time.perf_counter() - began - 0.5:.1f} s: {error}", flush=True)
    os._exit(0)  # rank 1 is dead, so the process group cannot be destroyed cleanly


def main() -> int:
    """Run the demo and return the exit code."""
    argparse.ArgumentParser("python -m apex.demo", description=__doc__).parse_args()
    os.environ["APEX_STALL_SECONDS"] = str(STALL_S)
    print("apex.demo: what one of two processes that train on this host reports", flush=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_run, args=(rank, store)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(ranks[0].exitcode != 0)


if __name__ == "__main__":
    sys.exit(main())
