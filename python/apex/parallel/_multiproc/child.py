# SPDX-License-Identifier: BSD-3-Clause
"""Prepares a process of ``multiproc`` before it becomes the script, and kills child processes.

Run by path, with the standard library only. The process id does not change.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill_children(limit_s: float = 5.0) -> None:
    """Kill the children of this process and, for a subreaper, all descendants. Linux only."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError):  # threads and processes may end in the meantime
            lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
            if not (pids := " ".join(lists).split()):
                return
            for pid in map(int, pids):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def main(launcher: str, options: str, end: str, *command: str) -> None:
    """Replace this process by the command with the options inserted at index ``end``:
    ``--rank=RANK`` is an option and its environment variable."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel kills this process with the launcher
    if os.getppid() != int(launcher):
        sys.exit("multiproc: the launcher has ended.")
    if os.environ["RANK"] != "0":
        fcntl.fcntl(1, fcntl.F_SETFL, os.O_APPEND)  # another job may write to the same file
        os.dup2(1, 2)
    inserted = []
    for option, variable in (pair.split("=") for pair in options.split()):
        inserted += [option, os.environ[variable]]
    parts = [*command[: int(end)], *inserted, *command[int(end) :]]
    os.execv(sys.executable, [sys.executable, "-u", *parts])


if __name__ == "__main__":
    main(*sys.argv[1:])
