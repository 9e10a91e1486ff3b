# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.demo`` trains with two processes on this host and injects faults into rank 1.

The demo takes about fifteen seconds and needs no GPU. It shows what rank 0 reports when rank 1 is
slightly slow in every step, when it is late once, and when it is killed. It writes a trace and, if
matplotlib is installed, a picture of a slow step into the current folder, or into the folder for
temporary files if the current folder is not writable.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

STALL_S = 2.0
STEPS = 20


TRACE, PICTURE = "apex-demo-trace.json", "apex-demo.png"


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


@contextlib.contextmanager
def _chapter(rank: int, title: str) -> Iterator[None]:
    dist.barrier()
    if rank == 0:
        print(f"\n--- {title} ---", flush=True)
    yield


def _run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    middle, slow = nn.Linear(256, 256), Slow()
    middle.weight.register_hook(slow)
    layers = [nn.Linear(256, 256), nn.ReLU(), middle, nn.ReLU(), nn.Linear(256, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
    with _chapter(rank, "two processes train"):
        seconds = _train(model, STEPS)
        if rank == 0:
            print(f"{seconds * 1e3:.1f} ms a step", flush=True)
    with _chapter(rank, "rank 1 is 20 ms slower in backward: model.straggler_report()"):
        slow.seconds = 0.02 if rank == 1 else 0
        seconds = _train(model, 3 * STEPS)
        if rank == 0:
            print(
                f"{seconds * 1e3:.1f} ms a step on both\n{model.straggler_report()}",
                end="",
                flush=True,
            )
    with _chapter(rank, "one of these steps, as a trace and as a plot"):
        model.record_overlap()
        _train(model, 1)
        report = model.overlap_report()
        assert report is not None
        folder = "" if os.access(os.curdir, os.W_OK) else tempfile.gettempdir()
        trace, picture = os.path.join(folder, TRACE), os.path.join(folder, PICTURE)
        report.save_trace(trace, group=dist.group.WORLD)
        written = f"{trace} (open it in https://ui.perfetto.dev)"
        with contextlib.suppress(ImportError):  # without matplotlib
            report.plot(picture, group=dist.group.WORLD)
            written += f", {picture}"
        if rank == 0:
            print(f"written: {written}", flush=True)
    with _chapter(rank, f"rank 1 is late: reported after {STALL_S:g} s (default: 10)"):
        slow.seconds = 2 * STALL_S if rank == 1 else 0
        _train(model, 1)
    slow.seconds = 0
    with _chapter(rank, "rank 1 is killed: the error of rank 0"):
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
    os.environ["APEX_STALL_SECONDS"] = str(STALL_S)
    print("apex.demo: what one of two processes that train on this host reports", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=_run, args=(r, os.path.join(folder, "s"))) for r in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return int(ranks[0].exitcode != 0)


if __name__ == "__main__":
    sys.exit(main())
