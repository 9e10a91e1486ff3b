# SPDX-License-Identifier: BSD-3-Clause
"""torchrun restarts a job after a worker was killed, as in docs/checkpoints.md.

The reference is the same program in two processes without a fault or launcher. The job must end
with the same bits. ``test_elastic_restart.py FOLDER [STEP]`` is one rank of the job, which resumes
from the checkpoint in its folder. In the backward of STEP rank 1 is killed, once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_support import RankPool, same_bits
from torch import Tensor, nn

from apex import amp
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel, convert_syncbn_model

pytestmark = pytest.mark.processes
KILLED_AT = 5
STEPS, EVERY = 8, 3


def die_once(mark: Path) -> None:
    """Uses a mark on disk, because a restarted process does not know about the previous one."""
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)


def train(rank: int, world: int, folder: str, kill_at: int | None = None) -> dict[str, Any]:
    """The final state of a run on this rank, and the step at which this process has started."""
    checkpoint = Path(folder) / "run.pt"
    torch.manual_seed(rank)  # the wrapper broadcasts rank 0's parameters
    net = convert_syncbn_model(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    )
    optimizer = FusedAdam(net.parameters(), lr=0.02, weight_decay=0.01)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O2", verbosity=0)
    state: dict[str, Any] = {"step": 0}
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])
    begun = state["step"]
    model = DistributedDataParallel(net, message_size=20)  # several buckets
    for step in range(begun, STEPS):
        x, target = batch(step, rank)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), target)
        if step == kill_at and rank == 1:
            # The batch norm has waited for rank 0 here, so rank 0 is also in this step.
            net[3].weight.register_hook(lambda _: die_once(Path(folder) / "killed"))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        state = {
            "step": step + 1,
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        if rank == 0 and (step + 1) % EVERY == 0:
            torch.save(state, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)
    return {**state, "begun": begun}


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
        [*command, __file__, str(folder), *arguments],
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
    wanted = ranks.run(2, train, str(whole))
    assert [result.pop("begun") for result in wanted] == [0, 0]

    done = torchrun(folder, str(KILLED_AT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "killed").exists()
    assert "exitcode: -9" in done.stderr, done.stderr
    found = [torch.load(folder / f"result{rank}.pt", weights_only=True) for rank in range(2)]
    # Both were restarted, and lost the steps since the last checkpoint.
    last = KILLED_AT // EVERY * EVERY
    assert [result.pop("begun") for result in found] == [last, last]
    assert last < KILLED_AT < STEPS
    assert same_bits(found, wanted)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), sys.argv[1]
    result = train(rank, dist.get_world_size(), folder, *map(int, sys.argv[2:]))
    torch.save(result, Path(folder) / f"result{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
