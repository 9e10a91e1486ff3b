# SPDX-License-Identifier: BSD-3-Clause
"""torchrun restarts a job after a worker was killed, as in docs/checkpoints.md.

The reference is the same program in two processes without a fault or launcher. The job must end
with the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import elastic_program
import pytest
import torch
from ddp_support import RankPool

pytestmark = pytest.mark.processes
PROGRAM = Path(elastic_program.__file__)
KILLED_AT = 5


def bits(value: object) -> object:
    """Tensors as bytes and dtype, so that ``==`` compares bits."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/checkpoints.md explains why
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "PET_LOCAL_ADDR": "localhost",  # this host's name may not resolve
    }
    return subprocess.run(
        [*command, str(PROGRAM), str(folder), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_killed_worker_job_restarts_and_ends_with_the_same_bits(
    ranks: RankPool, tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    folder.mkdir()
    wanted = ranks.run(2, elastic_program.train, str(whole))
    assert [result.pop("begun") for result in wanted] == [0, 0]

    done = torchrun(folder, str(KILLED_AT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "killed").exists()
    assert "exitcode: -9" in done.stderr, done.stderr
    found = [torch.load(folder / f"result{rank}.pt", weights_only=True) for rank in range(2)]
    # Both were restarted, and lost the steps since the last checkpoint.
    last = KILLED_AT // elastic_program.EVERY * elastic_program.EVERY
    assert [result.pop("begun") for result in found] == [last, last]
    assert last < KILLED_AT < elastic_program.STEPS
    assert bits(found) == bits(wanted)
