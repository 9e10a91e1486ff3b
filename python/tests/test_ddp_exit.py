# SPDX-License-Identifier: BSD-3-Clause
"""The end of a script and of a process group. Gloo's threads must end before the process runs its
static destructors, even if the script does not destroy its process group (scripts written for
NVIDIA's Apex never do)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ddp_support import free_port

# The output of the first registered exit handler comes last, after ours.
SCRIPT = """
import atexit, contextlib, os, sys

def report_threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            names.append(open(f"/proc/self/task/{task}/comm").read().strip())
    print("THREADS", [name for name in names if "gloo" in name], flush=True)

atexit.register(report_threads)
import torch
import torch.distributed as dist
late_import, destroy = sys.argv[3] == "late-import", sys.argv[4] == "destroy"
if not late_import:
    import apex.parallel
store, rank = "file://" + sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
from apex.parallel import DistributedDataParallel, SyncBatchNorm

model = torch.nn.Sequential(torch.nn.Linear(3, 4), SyncBatchNorm(4), torch.nn.Linear(4, 1))
ddp = DistributedDataParallel(model)
for _ in range(3):
    ddp(torch.randn(8, 3)).square().sum().backward()
unused = ddp(torch.randn(8, 3))
if destroy:
    dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are listed in /proc")
@pytest.mark.parametrize("imported", ["early-import", "late-import"])
@pytest.mark.parametrize("end", ["destroy", "no-destroy"])
def test_script_end_leaves_no_gloo_thread(tmp_path: Path, imported: str, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "store"), str(rank), imported, end],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for printed, errors in outputs:
        assert "THREADS []" in printed, (printed, errors)


AGAIN = """
import datetime, os, sys, torch, torch.distributed as dist
from apex.parallel import DistributedDataParallel
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
rank = int(sys.argv[2])
for round in range(5):
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)
    model = torch.nn.Linear(3, 1)
    model.weight.data.fill_(rank)
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(2, 3)).sum().backward()
    del ddp
    dist.barrier()
    dist.destroy_process_group()
    # The next job must not find the server of this one.
    print(round, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.processes
def test_destroyed_group_frees_the_port_for_the_next(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(AGAIN)
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), port, str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for _ in range(5):
            for rank in ranks:
                assert rank.stdout is not None
                assert rank.stdout.readline()
            until = time.monotonic() + 30
            while _listens(int(port)):
                assert time.monotonic() < until, "the store's server has not ended"
                time.sleep(0.01)
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write("\n")
                rank.stdin.flush()
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
