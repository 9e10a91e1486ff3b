# SPDX-License-Identifier: BSD-3-Clause
"""examples/slurm/train.sbatch, with SLURM's programs replaced by small bash scripts.

The job is the program of docs/howto/checkpointing.md. One of its processes is killed. The job is
then restarted and resumes, as docs/howto/elastic.md describes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ddp_support import free_port
from warm import run_script

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"

pytestmark = [
    pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash"),
    pytest.mark.processes,
    pytest.mark.slow,
]

#: Runs the command once for each node, in parallel.
SRUN = """#!/bin/bash
echo "$@" > srun.txt
while [ "$1" != torchrun ]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do "$@" & done
status=0
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do wait -n || status=$?; done
exit $status
"""
SCONTROL = """#!/bin/bash
if [ "$*" = "show hostnames node[1-2]" ]; then printf 'localhost\\nnode2\\n'; else exit 1; fi
"""
#: Once per job, by a mark on disk, because TORCHELASTIC_RESTART_COUNT differs by node.
DIES = """
        if epoch == 2 and dist.get_rank() == 1 and not os.path.exists("died"):
            open("died", "w").close()
            os._exit(3)  # rank 0 has taken part in this step, so it has written its checkpoint
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on the first of two nodes, both of which are this host."""
    programs = {
        "scontrol": SCONTROL,
        "srun": SRUN,
        "torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "2",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "PET_LOCAL_ADDR": "localhost",  # torchrun: the name of this host may not resolve
    }


def program() -> str:
    text = (ROOT / "docs" / "howto" / "checkpointing.md").read_text()
    block = re.search(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert block is not None
    code = block[1].replace("net = ", "torch.manual_seed(0)\nnet = ", 1)
    return code.replace("start = state", 'print("resumed at", state["epoch"])\n    start = state')


def test_job_two_nodes_resumes_after_a_process_died(tmp_path: Path, slurm: dict[str, str]) -> None:
    step = "        optimizer.step()\n"
    assert program().count(step) == 1
    (tmp_path / "train.py").write_text(program().replace(step, step + DIES))
    done = subprocess.run(
        ["bash", str(SBATCH), "train.py"],
        cwd=tmp_path,
        env=slurm,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("resumed at 2") == 2  # on both ranks
    # The process that ends itself, and perhaps the one that waits for it. A later failure would
    # mean that processes found the addresses of ended processes.
    assert done.stderr.count("failed (exitcode: 3)") == 1
    assert done.stderr.count("failed (exitcode: ") <= 2
    assert "--ntasks=2 --ntasks-per-node=1" in (tmp_path / "srun.txt").read_text()

    # Every rank has the same data here, so one uninterrupted process must end with the same result.
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "train.py").write_text(program())
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **place, "MASTER_PORT": str(free_port())}
    assert run_script(alone / "train.py", cwd=alone, env=env).returncode == 0
    found, wanted = (torch.load(folder / "run.pt") for folder in (tmp_path, alone))
    assert found["epoch"] == wanted["epoch"] == 3
    torch.testing.assert_close(found["model"], wanted["model"])
    torch.testing.assert_close(found["optimizer"]["state"], wanted["optimizer"]["state"])


def test_job_uses_the_gpus_of_a_node_and_divides_its_cores(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    (tmp_path / "bin" / "srun").write_text('#!/bin/bash\necho "$OMP_NUM_THREADS" "$@"\n')
    gpus = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "32"}
    done = subprocess.run(
        ["bash", str(SBATCH), "train.py", "--epochs", "9"],
        env={**slurm, **gpus},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    threads, _, command = done.stdout.strip().partition(" ")
    assert threads == "4"
    assert "--nproc-per-node=8" in command
    assert f"--rdzv-endpoint=localhost:{slurm['MASTER_PORT']}" in command
    assert command.endswith("train.py --epochs 9")
