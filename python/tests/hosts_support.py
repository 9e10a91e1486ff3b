# SPDX-License-Identifier: BSD-3-Clause
"""Several hosts on one machine: ranks in separate PID namespaces, which cannot see each other.

A test runs a module-level function ``body(rank, world, *args)``::

    run_on_hosts([2, 1], _body, 3.0)     # ranks 0 and 1 on one host, rank 2 on another

Each host is one process, forked from a process that has imported slow modules. It forks its ranks.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ddp_support import PRELOADED, RanksFailed, serve_store

TIMEOUT_S = 120
# The effect of `unshare --pid --fork --kill-child --mount-proc`, without starting another program.
CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
PR_SET_PDEATHSIG = 1


def why_not() -> str:
    """Why this machine does not support it, or ''."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if tried.returncode == 0 else tried.stderr.strip() or "unshare failed"


def run_on_hosts(
    hosts: list[int],
    body: Callable[..., Any],
    *args: Any,
    lost: tuple[int, ...] = (),
    environment: dict[int, dict[str, str]] | None = None,
) -> list[Any]:
    """The results by rank; None for ranks in ``lost``, which are expected to end.

    Args:
        environment: variables of single ranks.

    Raises:
        RanksFailed: with what every failing rank, and every rank that hangs, has said.
    """
    world = sum(hosts)
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    variables = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        # As with torchrun: the store survives all ranks.
        store = serve_store()
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        (Path(folder) / "store").write_text(f"tcp://127.0.0.1:{store.port}")
        processes, first = [], 0
        for ranks in hosts:
            here = range(first, first + ranks)
            changes = [(environment or {}).get(rank, {}) for rank in here]
            task = (folder, here, world, body, args, variables, changes)
            process = context.Process(target=_start_host, args=task)
            process.start()
            processes.append(process)
            first += ranks
        until = time.monotonic() + TIMEOUT_S
        for process in processes:
            process.join(max(0.1, until - time.monotonic()))
            if process.is_alive():
                process.kill()  # and with it all processes of its namespace
                process.join()
        results, errors = [], []
        for rank in range(world):
            reply = Path(folder) / f"reply{rank}"
            kind, value = ("lost", None)
            if reply.exists():
                kind, value = pickle.loads(reply.read_bytes())
            if kind == "error" or (kind == "lost" and rank not in lost):
                errors.append(f"--- rank {rank} of {world}: {value or 'no reply'}")
            results.append(value)
        if errors:
            raise RanksFailed("\n" + "\n".join(errors))
        return results


def _start_host(folder: str, ranks: range, *task: Any) -> None:
    """Start the first process of a namespace. When it ends, all processes of the host end."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    call("unshare", CLONE_NEWPID | CLONE_NEWNS)
    child = os.fork()
    if child == 0:
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
            call("mount", b"proc", b"/proc", b"proc", flags, None)
            _serve(Path(folder), ranks, *task)
        except BaseException:  # noqa: BLE001  (the test says that there is no reply)
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _serve(
    folder: Path,
    ranks: range,
    world: int,
    body: Callable[..., Any],
    args: Any,
    variables: dict[str, str],
    changes: list[dict[str, str]],
) -> None:
    """One host, whose ranks are processes of one namespace."""
    import torch

    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(variables)
    os.environ["OMP_NUM_THREADS"] = "1"
    children = []
    for rank, changed in zip(ranks, changes, strict=True):
        child = os.fork()
        if child == 0:
            os.environ.update(changed)
            _run_rank(folder, rank, world, body, args)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _run_rank(folder: Path, rank: int, world: int, body: Callable[..., Any], args: Any) -> None:
    from ddp_support import init_group

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            init_group(rank, world, (folder / "store").read_text())
            reply = ("ok", body(rank, world, *args))
    except BaseException:  # noqa: BLE001  (everything goes to the test)
        reply = ("error", traceback.format_exc())
    written = folder / f"reply{rank}.part"
    written.write_bytes(pickle.dumps(reply))
    written.rename(folder / f"reply{rank}")
    if reply[0] == "ok":
        dist.destroy_process_group()
    os._exit(0)
