# SPDX-License-Identifier: BSD-3-Clause
"""The end of a script and of a process group. Gloo's threads must end before the process runs its
static destructors, even if the script does not destroy its process group (scripts written for
NVIDIA's Apex never do)."""

from __future__ import annotations

import os
import subprocess
import sys
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
late_import = sys.argv[3] == "late-import"
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
"""


def _run(folder: Path, source: str, *arguments: str) -> list[str]:
    """The output of the script on two ranks, which get the folder and their rank first."""
    script = folder / "script.py"
    script.write_text(source)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder / "store"), str(rank), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return outputs


@pytest.mark.processes
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are listed in /proc")
@pytest.mark.parametrize("imported", ["early-import", "late-import"])
def test_script_end_leaves_no_gloo_thread(tmp_path: Path, imported: str) -> None:
    for printed in _run(tmp_path, SCRIPT, imported):
        assert "THREADS []" in printed, printed


AGAIN = """
import datetime, os, pathlib, socket, sys, time, torch, torch.distributed as dist
from apex.parallel import DistributedDataParallel

rank, port = int(sys.argv[2]), int(sys.argv[3])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

def until(condition):
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "the store's server has not ended"
        time.sleep(0.01)

def nobody_listens():
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0

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
    ended = pathlib.Path(f"{sys.argv[1]}{round}")
    if rank == 0:
        until(nobody_listens)
        ended.touch()
    until(ended.exists)
"""


@pytest.mark.processes
def test_destroyed_group_frees_the_port_for_the_next(tmp_path: Path) -> None:
    _run(tmp_path, AGAIN, str(free_port()))
