# SPDX-License-Identifier: BSD-3-Clause
"""What a process of ``multiproc`` does before it becomes the script, and the end of its children.

Run by path, with the standard library alone. The process id stays the same.
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
    """Sets an attribute of this process; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill_children(limit_s: float = 5.0) -> None:
    """Kills the children of this process, and as a subreaper all descendants; on Linux only."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError):  # threads and processes end meanwhile
            lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
            if not (pids := " ".join(lists).split()):
                return
            for pid in map(int, pids):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def main(launcher: str, options: str, *command: str) -> None:
    """Becomes the command, with options added: ``--rank=RANK``, an option and its variable."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a launcher that is killed leaves no rank behind
    if os.getppid() != int(launcher):
        sys.exit("multiproc: the launcher has ended.")
    if os.environ["RANK"] != "0":
        fcntl.fcntl(1, fcntl.F_SETFL, os.O_APPEND)  # another job may write to the same file
        os.dup2(1, 2)
    for option, variable in (pair.split("=") for pair in options.split()):
        command += option, os.environ[variable]
    os.execv(sys.executable, [sys.executable, "-u", *command])


if __name__ == "__main__":
    main(*sys.argv[1:])
