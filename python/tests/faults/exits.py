# SPDX-License-Identifier: BSD-3-Clause
"""Ends many small jobs without destroy_process_group() under load. Each must exit with 0.

    python python/tests/faults/exits.py --runs 500

Two ranks train five steps and return from their script. Meanwhile the requested number of processes
keeps the cores busy. If gdb is installed, stacks of processes that do not end are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from campaign import Zygote, free_port
from cases import Case

LIMIT = 60  # s, for one job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--load", type=int, default=2, help="busy processes beside them")
    arguments = parser.parse_args()
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.load)
    ]
    folder = Path(tempfile.mkdtemp(prefix="apex-exits-"))
    zygote = Zygote()
    running: dict[int, tuple[float, list[int]]] = {}
    begun, bad = 0, 0
    try:
        while begun < arguments.runs or running:
            if begun < arguments.runs and len(running) < arguments.at_once:
                running[begun] = (time.time(), _start(zygote, folder / str(begun)))
                begun += 1
            time.sleep(0.01)
            zygote.poll()
            for number, (since, ids) in list(running.items()):
                left = [one for one in ids if one not in zygote.ended]
                if left and time.time() < since + LIMIT:
                    continue
                statuses = [zygote.ended.get(one) for one in ids]
                if any(statuses) or left:
                    bad += 1
                    print(f"run {number}: {statuses}")
                    for one in left:
                        pid = str(zygote.pids[one])
                        with contextlib.suppress(FileNotFoundError):
                            subprocess.run(
                                ["gdb", "-p", pid, "-batch", "-ex", "thread apply all bt 14"]
                            )
                        os.kill(int(pid), 9)
                del running[number]
                shutil.rmtree(folder / str(number))
    finally:
        zygote.close()
        for process in busy:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{begun - bad} of {begun} jobs ended with 0")
    return 1 if bad else 0


def _start(zygote: Zygote, folder: Path) -> list[int]:
    port = free_port()
    ids = []
    for rank in range(2):
        own = folder / str(rank)
        own.mkdir(parents=True)
        case = Case("plain", "exit", "none", 2, -1, "apex")
        ids.append(
            zygote.start(
                {
                    **vars(case),
                    "rank": rank,
                    "timeout": 30,
                    "address": "127.0.0.1",
                    "port": port,
                    "host": "",
                    "report": str(own / "report"),
                    "log": str(own / "log"),
                    "folder": str(own),
                    "go": str(own / "go"),
                }
            )
        )
    return ids


if __name__ == "__main__":
    sys.exit(main())
