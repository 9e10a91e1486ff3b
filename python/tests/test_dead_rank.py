# SPDX-License-Identifier: BSD-3-Clause
"""A rank that ends is named on stderr before the launcher has killed the other ranks.

Run as a program, it is one rank of the job.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddp_support import free_port
from torch import Tensor, nn

PLACES = ["construction", "batch norm", "backward", "loader"]
STEP = 20


# --- the job ---


def _end(end: str) -> None:
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("this rank has a bug")


def _job(place: str, end: str) -> None:
    from apex.parallel import DistributedDataParallel, SyncBatchNorm

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ends = False

    def dies(grad: Tensor) -> Tensor:
        if ends and place == "backward":
            _end(end)
        return grad

    def dies_in_forward(module: nn.Module, arguments: object) -> None:
        if ends and place == "batch norm":
            _end(end)

    model = nn.Sequential(nn.Linear(8, 64), SyncBatchNorm(64), nn.ReLU(), nn.Linear(64, 4))
    model[1].register_forward_pre_hook(dies_in_forward)
    if rank == world - 1 and place == "construction":
        _end(end)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(10 * STEP):
        ends = rank == world - 1 and step == STEP
        if ends and place == "loader":
            _end(end)
        y = ddp(torch.randn(16, 8))
        y.register_hook(dies)
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
        time.sleep(0.002)
    dist.destroy_process_group()


# --- measuring ---


def _output(launcher: str, world: int, place: str, channel: str, end: str, folder: Path) -> str:
    """What all ranks and the launcher have written."""
    commands = {
        "torchrun": ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}"],
        "multiproc": ["apex.parallel.multiproc", f"--nproc={world}", "--master-port=0"],
    }
    command = [sys.executable, "-m", *commands[launcher], __file__, "--place", place, "--end", end]
    environment = dict(os.environ, APEX_HOST_CHANNEL=channel, OMP_NUM_THREADS="1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        environment.pop(name, None)
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    logs = [path.read_text() for path in sorted(folder.glob("rank_*.log"))]
    for path in folder.glob("rank_*.log"):
        path.unlink()
    return "\n".join([run.stdout, run.stderr, *logs])


def named(text: str, world: int) -> int:
    """The number of ranks with a line, or an error, that names the rank that has ended."""
    lost = world - 1
    ended = rf"rank {lost} has ended \(process \d+, (?:signal 9|exit code 1)\)"
    lines = re.findall(
        rf"^apex: rank (\d) of {world}: {ended}, while this rank waits in: \S", text, re.M
    )
    assert len(lines) == len(set(lines)), f"printed twice:\n{text}"
    errors = re.findall(rf"Error: rank (\d)(?: of {world})?: .*\brank {lost}\b", text)
    return len({*lines, *errors})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("launcher", "place"), [*(("torchrun", place) for place in PLACES), ("multiproc", "backward")]
)
def test_rank_ends_it_is_named_before_the_others_are_killed(
    launcher: str, place: str, tmp_path: Path
) -> None:
    end = "raises" if place in ("batch norm", "loader") else "killed"
    channel = "0" if place in ("backward", "batch norm") else "1"
    # A launcher looks for ended ranks every 100 ms, and so may end the others at once: one such run
    # is not a fault, five in a row are.
    for _ in range(5):
        text = _output(launcher, 2, place, channel, end, tmp_path)
        if named(text, 2) == 1:
            return
    pytest.fail(f"no rank was named in five runs; the last one:\n{text}")


@pytest.mark.processes
def test_ranks_that_end_normally_are_not_named(tmp_path: Path) -> None:
    text = _output("torchrun", 2, "nowhere", "1", "killed", tmp_path)
    assert "has ended" not in text, text


_TWO_RANKS = """
import pathlib, sys, time
import torch, torch.distributed as dist
from apex.parallel import DistributedDataParallel

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    (folder / "waits").touch()
    while not (folder / "killed").exists():
        time.sleep(0.01)
DistributedDataParallel(torch.nn.Linear(2, 2))
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_rank_of_another_job_of_the_same_parent_that_ends_is_not_named(tmp_path: Path) -> None:
    def start(rank: int, port: int, *command: str) -> subprocess.Popen[str]:
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    other = start(1, free_port(), "-c", "import time; time.sleep(600)")
    port = free_port()
    job = [start(rank, port, "-c", _TWO_RANKS, str(tmp_path)) for rank in (0, 1)]
    while not (tmp_path / "waits").exists():
        assert job[1].poll() is None
        time.sleep(0.05)
    other.kill()
    other.wait()
    (tmp_path / "killed").touch()
    outputs = [process.communicate(timeout=120)[0] for process in job]
    assert [process.returncode for process in job] == [0, 0], outputs
    assert "has ended" not in "".join(outputs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--place")
    parser.add_argument("--end")
    parser.add_argument("--local_rank", "--local-rank")
    options = parser.parse_args()
    _job(options.place, options.end)
