# SPDX-License-Identifier: BSD-3-Clause
"""Several hosts on one machine: ranks in namespaces of processes, which cannot see each other.

A test runs a module-level function ``body(rank, world, *args)``::

    run_on_hosts([2, 1], _body, 3.0)     # ranks 0 and 1 on one host, rank 2 on another

Each host is one process that imports what takes seconds, and forks its ranks.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_support import RanksFailed

TIMEOUT_S = 120
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def why_not() -> str:
    """Why this machine cannot do it, or ''."""
    try:
        tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, timeout=20)
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
    with tempfile.TemporaryDirectory() as folder:
        task = (body.__module__, body.__name__, args, world, environment or {})
        (Path(folder) / "task").write_bytes(pickle.dumps(task))
        processes, first = [], 0
        for ranks in hosts:
            code = f"import hosts_support as h; h.serve({folder!r}, {first}, {ranks})"
            search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
            processes.append(
                subprocess.Popen(
                    [*NAMESPACE, sys.executable, "-c", code],
                    env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
                )
            )
            first += ranks
        until = time.monotonic() + TIMEOUT_S
        for process in processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # and all in its namespace
                process.wait()
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


def serve(folder: str, first: int, ranks: int) -> None:
    """One host: its ranks are processes of the same namespace."""
    import torch
    import torch._dynamo
    import torch.distributed

    import apex.parallel  # noqa: F401

    torch.set_num_threads(1)
    module, name, args, world, environment = pickle.loads((Path(folder) / "task").read_bytes())
    body = getattr(importlib.import_module(module), name)
    children = []
    for rank in range(first, first + ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(environment.get(rank, {}))
            _run_rank(Path(folder), rank, world, body, args)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _run_rank(folder: Path, rank: int, world: int, body: Callable[..., Any], args: Any) -> None:
    import torch.distributed as dist
    from ddp_support import init_group

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            init_group(rank, world, str(folder / "store"))
            reply = ("ok", body(rank, world, *args))
    except BaseException:  # noqa: BLE001  (everything goes to the test)
        reply = ("error", traceback.format_exc())
    written = folder / f"reply{rank}.part"
    written.write_bytes(pickle.dumps(reply))
    written.rename(folder / f"reply{rank}")
    if reply[0] == "ok":
        dist.destroy_process_group()
    os._exit(0)


def stop_for(seconds: float) -> None:
    """This process stops, and goes on so much later."""
    mine = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(mine, signal.SIGCONT)
        os._exit(0)
    os.kill(mine, signal.SIGSTOP)
