# SPDX-License-Identifier: BSD-3-Clause
"""One rank of a job of three. It runs scenarios in sequence; in each of them some rank is late.

    python stalls_program.py PORT RANK [SCENARIO...]

Prints a line of JSON per scenario: the report that this rank has printed in it, or null, and
the rank and text that its logger received.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel, SyncBatchNorm, stall_report

LATE_S = 2.5 * float(os.environ["APEX_STALL_SECONDS"])
WORLD = 3


class Late(nn.Module):
    """Waits in the next forward or backward, on the chosen rank."""

    in_forward = in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward:
            time.sleep(LATE_S)
        if self.in_backward:
            x.register_hook(self.wait)
        self.in_forward = self.in_backward = False
        return x

    @staticmethod
    def wait(grad: Tensor) -> Tensor:
        time.sleep(LATE_S)
        return grad


def build(late: Late) -> DistributedDataParallel:
    model = nn.Sequential(
        nn.Linear(4, 8), late, SyncBatchNorm(8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), late)
    )
    return DistributedDataParallel(model, message_size=20)


def step(ddp: nn.Module) -> None:
    ddp(torch.randn(5, 4)).square().sum().backward()


def load_data() -> None:
    time.sleep(LATE_S)


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).usleep(int(LATE_S * 1e6))


def scenarios(rank: int) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """The scenarios: name, the late rank, and this rank's operation."""
    late = Late()
    ddp = build(late)
    for _ in range(3):
        step(ddp)

    def before(culprit: int, does: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            if rank == culprit:
                does()
            step(ddp)

        return run

    def in_backward() -> None:
        late.in_backward = True

    def in_forward() -> None:
        late.in_forward = True

    def late_to_construct() -> None:
        if rank == 2:
            load_data()
        build(Late())

    def one_after_the_other() -> None:
        """When the stall is reported, rank 1 has arrived and waits as well."""
        if rank > 0:
            time.sleep((0.7 if rank == 1 else 2.5) * float(os.environ["APEX_STALL_SECONDS"]))
        step(ddp)

    def stopped() -> None:
        if rank == 1:
            if os.fork() == 0:  # the child continues its parent
                time.sleep(LATE_S)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        step(ddp)

    yield "data", 1, before(1, load_data)
    yield "store", 0, before(0, load_data)
    yield "backward", 1, before(1, in_backward)
    yield "forward", 2, before(2, in_forward)
    yield "native", 1, before(1, hold_the_interpreter)
    yield "construction", 2, late_to_construct
    yield "one_after_the_other", 2, one_after_the_other
    yield "stopped", 1, stopped


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.got: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.got.append((record.rank, record.getMessage()))  # type: ignore[attr-defined]


def main(port: int, rank: int, only: list[str]) -> None:
    torch.manual_seed(rank)
    records = Records()
    logging.getLogger("apex.parallel").addHandler(records)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    last = None
    for name, culprit, run in scenarios(rank):
        if only and name not in only:
            continue
        run()
        dist.barrier()  # torch's own barrier
        verdict = stall_report()
        new = verdict if verdict != last else None
        last = verdict
        until = time.monotonic() + 60  # a thread writes the log
        while new is not None and not records.got and time.monotonic() < until:
            time.sleep(0.01)
        logged, records.got = records.got, []
        entry = {"name": name, "culprit": culprit, "verdict": new, "logged": logged}
        print(json.dumps(entry), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
