# SPDX-License-Identifier: BSD-3-Clause
"""Measures all-reduces between two processes on this host.

Each process is started as ``python -m apex._doctor.here RANK FOLDER TIMEOUT_S BACKEND...``. Rank 0
appends a line to a file after each backend, so results measured before a failure are kept.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from apex._doctor import measure

_RESULTS = "results"
#: Extracts the reason from the warning of the backend `apex` (cpp/src/comm/host_topology.cpp).
NOT_SHARED = re.compile(r"apex: the ranks communicate .*?, since (.*); APEX_HOST_")


@dataclass(frozen=True)
class Outcome:
    """The measurements of the two processes.

    Attributes:
        measured: one result per backend, up to a failure.
        not_shared: why the backend `apex` did not share memory, from its warning; or None.
        problem: why some backends were not measured, in one line; None if all were.
    """

    measured: tuple[measure.AllReduce, ...]
    not_shared: str | None
    problem: str | None


def run(backends: Sequence[str], timeout_s: float) -> Outcome:
    """Start the processes and wait for them. They are killed after ``timeout_s``.

    A signal that would end this process takes effect after the processes are killed and their files
    deleted. Only the main thread may call this.
    """
    caught: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        return _run(backends, timeout_s, caught)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if caught:
            os.kill(os.getpid(), caught[0])


def _run(backends: Sequence[str], timeout_s: float, caught: Sequence[int]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="apex_doctor_") as name:
        folder = Path(name)
        processes: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            try:
                for rank in (0, 1):
                    # A file, because an error may be longer than the buffer of a pipe.
                    file = stack.enter_context((folder / f"output{rank}").open("wb"))
                    arguments = [str(rank), name, str(timeout_s), *backends]
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", __name__, *arguments],
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=file,
                        )
                    )
                codes = _wait(processes, timeout_s, caught)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        output = [(folder / f"output{rank}").read_text(errors="replace") for rank in (0, 1)]
        measured = []
        with contextlib.suppress(FileNotFoundError):
            lines = (folder / _RESULTS).read_text().splitlines()
            measured = [measure.AllReduce(**json.loads(line)) for line in lines]
    missing = ", ".join(backends[len(measured) :])
    failure = f"did not measure {missing}" if missing else "failed after their measurements"
    problem = None
    if codes != [0, 0]:
        why = f"no end within {timeout_s:g} s"
        for rank in (0, 1):
            if codes[rank]:
                lines = output[rank].strip().splitlines()
                why = lines[-1] if lines else f"process {rank} ended with exit code {codes[rank]}"
                break
        problem = f"two processes here {failure}: {why}"
    reason = NOT_SHARED.search("\n".join(output))
    return Outcome(tuple(measured), reason[1] if reason else None, problem)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], timeout_s: float, caught: Sequence[int]
) -> list[int | None]:
    """Wait until all processes have ended, one has failed, the time is over or a signal was caught.
    Return the exit codes.
    """
    until = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes or caught or time.monotonic() > until:
            return codes
        time.sleep(0.02)


def main(arguments: Sequence[str]) -> None:
    rank, folder, timeout_s = int(arguments[0]), Path(arguments[1]), float(arguments[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    for backend in arguments[3:]:
        device = torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        measured = measure.all_reduce(backend, device, timeout_s)
        if rank == 0:
            with (folder / _RESULTS).open("a") as results:
                results.write(json.dumps(asdict(measured)) + "\n")
        dist.barrier()  # rank 1 may fail with the next backend, and then rank 0 is killed
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
