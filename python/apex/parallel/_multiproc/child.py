# SPDX-License-Identifier: BSD-3-Clause
"""The first moments of each process that ``multiproc`` starts, and the ends of those left over.

Run by path as a program (``python -I child.py FOLDER``), with nothing but the standard
library: it makes the process end with its launcher, sends the output of all ranks but 0 to their
log, appends the rank's options, and becomes the script. The process id stays the same throughout,
so signals and exit codes are those of the script itself.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

#: In the folder given as the only argument.
COMMAND_FILE = "command.json"

#: The file of a global rank's output, for all ranks but 0; NVIDIA's Apex called it GPU_{}.log.
LOG_FILE = "rank_{}.log"

#: Same order of meaning as `script.RANK_OPTIONS`, which cannot be imported from here.
VARIABLES = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

#: How long processes left over have between SIGTERM and SIGKILL, in seconds.
GRACE_S = 5.0


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on, processes that lose their parent below this one become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_orphans() -> None:
    """End all remaining children of this process: SIGTERM, and SIGKILL after GRACE_S.

    For a launcher whose own processes have ended; what is left was started by them. Blocks until
    they are gone, but for those that the kernel does not let go in 2 * GRACE_S. Linux only.
    """
    start = time.monotonic()
    while (children := _children()) and time.monotonic() < start + 2 * GRACE_S:
        number = signal.SIGTERM if time.monotonic() < start + GRACE_S else signal.SIGKILL
        for child in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, number)
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)


def _children() -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # a system without /proc
        for task in os.listdir("/proc/self/task"):
            # A thread may end between the listing and the reading; its file is gone then.
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def main() -> None:
    with open(os.path.join(sys.argv[1], COMMAND_FILE)) as file:
        job = json.load(file)
    # So that a launcher that is killed leaves nothing behind; it survives the exec below.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job["launcher"]:
        sys.exit("multiproc: the launcher is gone.")
    rank = os.environ["RANK"]
    if rank != "0":
        path = os.path.join(job["log_dir"], LOG_FILE.format(rank))
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
    command = job["command"]
    for option in job["append"]:
        command += [option, os.environ[VARIABLES[option[2:].replace("-", "_")]]]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
