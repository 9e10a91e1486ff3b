# SPDX-License-Identifier: BSD-3-Clause
"""Runs scripts in processes that have imported torch, because the import takes longest.

Destructors of statics and functions registered with ``atexit`` do not run.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from ddp_support import PRELOADED

from apex.parallel import _multiproc_child


def run_script(
    script: Path | str, *arguments: str, cwd: Path, env: Mapping[str, str], timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Like ``python script arguments`` in that folder. Returns its stdout and stderr.

    Raises:
        subprocess.TimeoutExpired: it was killed after the timeout.
    """
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    process = _start(script, arguments, cwd, env, out, err)
    return _finish([process], [str(script), *arguments], out, err, timeout_s)


def run_script_on_ranks(
    ranks: int,
    script: Path | str,
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str],
    timeout_s: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Like ``python -m apex.parallel.multiproc --nproc=ranks script arguments`` in that folder.

    ``env`` contains MASTER_ADDR and MASTER_PORT. The exit code is that of the first rank that
    failed. The others are then killed. Output goes to rank_<rank>.log, as with multiproc.

    Raises:
        subprocess.TimeoutExpired: they were killed after the timeout.
    """
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        mine = {**env, **{name: str(number) for name, number in place.items()}}
        log = cwd / f"rank_{rank}.log"
        files = (out, err) if rank == 0 else (log, log)
        child = (_multiproc_child.__file__, (str(script), *arguments))
        processes.append(_start(*child, cwd, mine, *files))
    return _finish(processes, [str(script), *arguments], out, err, timeout_s)


def _start(
    script: Path | str,
    arguments: tuple[str, ...],
    cwd: Path,
    env: Mapping[str, str],
    out: Path,
    err: Path,
) -> BaseProcess:
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(
        target=_main, args=(str(script), arguments, str(cwd), dict(env), str(out), str(err))
    )
    process.start()
    return process


def _finish(
    processes: list[BaseProcess], command: list[str], out: Path, err: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    deadline = time.monotonic() + timeout_s
    running = {process.sentinel: process for process in processes}
    code = 0
    while running:
        ended = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            code = code or process.exitcode
        if running and (code or not ended):
            for process in running.values():
                process.kill()
                process.join()
            if not code:
                print(err.read_text(), file=sys.stderr)
                raise subprocess.TimeoutExpired(command, timeout_s, out.read_bytes())
            break
    return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


def _main(
    script: str, arguments: tuple[str, ...], cwd: str, env: dict[str, str], out: str, err: str
) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *arguments]
    more = env.get("PYTHONPATH")
    sys.path[:0] = [os.path.dirname(script), *(more.split(os.pathsep) if more else [])]
    runpy.run_path(script, run_name="__main__")
