# SPDX-License-Identifier: BSD-3-Clause
"""Forks the ranks of the campaign from a process that has imported everything once.

Reads one case per line (JSON) from standard input, forks its rank, and writes ``{"started": id,
"pid": pid}`` and later ``{"ended": id, "status": status}``. A rank reports by lines in its file.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x20000000, 0x40000000


def _enter_host(namespace: str) -> None:
    """Become a process of another host, with its own network and PID namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWPID | CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "cannot enter a namespace")
    child = os.fork()
    if child:  # the parent represents the rank
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    libc.mount(b"none", b"/", None, 0x44000, None)  # private, so that the mount stays here
    libc.mount(b"proc", b"/proc", b"proc", 0, None)


def _shut_sockets() -> None:
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as one:
                one.getpeername()  # listening sockets have none
                one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def rank_main(case: dict[str, Any]) -> int:
    import torch
    import torch.distributed as dist
    from programs import Injected, Run, train

    rank, world, fault = case["rank"], case["world"], case["fault"]
    report = open(case["report"], "a", buffering=1)  # noqa: SIM115

    def say(**what: Any) -> None:
        report.write(json.dumps({"time": time.time(), **what}) + "\n")

    def strike(moment: str) -> None:
        if rank != case["culprit"] or moment != case["moment"]:
            return
        if strike.done:
            return
        strike.done = True
        say(struck=moment)
        if fault in ("exception", "exception, caught"):
            raise Injected("injected")
        elif fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "exits":
            os._exit(0)
        elif fault.startswith(("stopped", "cut off")):
            # The campaign injects this fault, and reverts it.
            while not os.path.exists(case["go"]):
                time.sleep(0.01)
        elif fault == "sockets shut":
            _shut_sockets()
        elif fault == "group closed":
            dist.destroy_process_group()
        elif fault == "late":
            time.sleep(case["late"])
        else:
            raise AssertionError(f"no fault {fault!r}")

    strike.done = False
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    timeout = datetime.timedelta(seconds=case["timeout"])
    # As tcp:// does, but with more time for ranks that start under load.
    start = datetime.timedelta(seconds=60)
    store = dist.TCPStore(case["address"], case["port"], world, rank == 0, start)
    store.set_timeout(timeout)
    backend = "apex" if case["library"] == "torch_apex" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    del store
    dist.barrier()
    try:
        run = Run(rank, world, case["library"], strike)
        train(run, case["program"], "caught" in fault)
        if fault == "late":
            dist.barrier()  # the last rank to end a step may host the store
    except BaseException as error:
        say(raised=type(error).__name__, message=str(error))
        traceback.print_exc()
        return 1
    say(done=True)
    return 0


def _become_rank(case: dict[str, Any]) -> int:
    os.setsid()
    log = os.open(case["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(case.get("environment", {}))
    if case["host"]:
        _enter_host(case["host"])
    os.chdir(case["folder"])
    os.environ["TMPDIR"] = case["folder"]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/tmp"  # torch creates it when optimizers are imported
    return rank_main(case)


def main() -> None:
    import programs  # noqa: F401
    import torch._dynamo  # noqa: F401  by the first optimizer, else once in each rank

    import apex.amp
    import apex.parallel  # noqa: F401

    children: dict[int, int] = {}
    gc.freeze()  # keeps memory shared with the children
    print(json.dumps({"ready": True}), flush=True)
    buffer = b""
    while True:
        if select.select([0], [], [], 0.05)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            buffer += chunk
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            case = json.loads(line)
            pid = os.fork()
            if pid == 0:
                # Exit as a script does, with exit handlers and static destructors.
                sys.exit(_become_rank(case))
            children[pid] = case["id"]
            print(json.dumps({"started": case["id"], "pid": pid}), flush=True)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            print(json.dumps({"ended": children.pop(pid), "status": status}), flush=True)


if __name__ == "__main__":
    main()
