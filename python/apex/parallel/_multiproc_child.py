# SPDX-License-Identifier: BSD-3-Clause
"""Prepares a process of ``multiproc`` before it becomes the script. Standard library only.

The arguments are the pairs ``--rank=RANK`` of an option and its environment variable, the index at
which the options are inserted, and the script with its arguments.
"""

import ctypes
import fcntl
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(options: str, end: str, *command: str) -> None:
    """Replace this process by the command."""
    if sys.platform == "linux":  # the kernel ends this process with the launcher
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ["RANK"] != "0":
        fcntl.fcntl(1, fcntl.F_SETFL, os.O_APPEND)  # another job may write to the same file
        os.dup2(1, 2)
    pairs = [pair.split("=") for pair in options.split()]
    inserted = [part for option, variable in pairs for part in (option, os.environ[variable])]
    parts = [*command[: int(end)], *inserted, *command[int(end) :]]
    os.execv(sys.executable, [sys.executable, "-u", *parts])


if __name__ == "__main__":
    main(*sys.argv[1:])
