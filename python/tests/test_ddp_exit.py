# SPDX-License-Identifier: BSD-3-Clause
"""Exit of a script: Gloo's threads must end before the process runs its static destructors, even if
the script does not destroy its process group (scripts written for NVIDIA's Apex never do)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = ddp(torch.randn(8, 3)).square().sum()
    loss.backward()
    optimizer.step()
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
