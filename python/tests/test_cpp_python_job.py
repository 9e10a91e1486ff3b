# SPDX-License-Identifier: BSD-3-Clause
"""A C++ program and a Python program are ranks of one job and train the same model."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from ddp_support import free_port
from package_support import cpp_program
from warm import run_script

# Against hangs only.
TIMEOUT_S = 600
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PYTHON_RANK = """
import contextlib
import sys
import torch
from torch import nn
import torch.distributed as dist
from apex.parallel import DistributedDataParallel
from apex.parallel.LARC import LARC

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(100 + rank)
# A size in MiB is the same buckets in both languages, the first one included.
options = {"bucket_cap_mb": 25} if sys.argv[2] == "no_sync" else {}
model = DistributedDataParallel(Net(), **options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
if sys.argv[2] == "larc":
    optimizer = LARC(optimizer)

def backward(step):
    x = torch.sin(torch.arange(48, dtype=torch.float32).view(8, 6) + (10 * step + rank))
    (model(x) - x[:, :3]).square().mean().backward()

joins = sys.argv[2] == "join"
with model.join() if joins else contextlib.nullcontext():
    for step in range(4 + 2 * rank if joins else 6):
        optimizer.zero_grad()
        if sys.argv[2] == "no_sync":
            with model.no_sync():
                backward(100 + step)
        backward(step)
        optimizer.step()
with open(f"{sys.argv[1]}{rank}", "wb") as file:
    for parameter in model.parameters():
        file.write(parameter.detach().numpy().tobytes())
dist.destroy_process_group()
"""


def start(folder: Path, program: Path, script: Path, languages: list[str], way: str) -> None:
    """Python ranks are forked from a process that has imported torch."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting["WORLD_SIZE"] = str(len(languages))

    def start_rank(rank: int) -> subprocess.CompletedProcess[str]:
        env = {**ENVIRONMENT, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if languages[rank] == "python":
            own = folder / str(rank)
            own.mkdir()
            arguments = (str(folder / "parameters"), way)
            return run_script(script, *arguments, cwd=own, env=env, timeout_s=TIMEOUT_S)
        command = [str(program), f"{folder}/parameters{rank}", way]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)

    with ThreadPoolExecutor(len(languages)) as pool:
        for result in pool.map(start_rank, range(len(languages))):
            assert result.returncode == 0, result.stdout + result.stderr


def train(folder: Path, languages: list[str], way: str) -> list[np.ndarray]:
    """Parameters of every rank after training. `languages` lists the language of each rank."""
    script = folder / "rank.py"
    script.write_text(PYTHON_RANK)
    program = cpp_program("cpp", "tests", "package", "apex_cpp_rank")
    start(folder, program, script, languages, way)
    return [
        np.fromfile(folder / f"parameters{rank}", dtype=np.float32)
        for rank in range(len(languages))
    ]


@pytest.mark.processes
@pytest.mark.parametrize("way", ["sgd", "larc", "no_sync", "join"])
def test_job_of_cpp_and_python_ranks_parameters_bitwise_equal(tmp_path: Path, way: str) -> None:
    # Rank 0's seed determines the initial parameters, in either language.
    results = []
    for languages in (["c++", "python"], ["python", "c++"], ["python", "python"]):
        folder = tmp_path / "-".join(languages)
        folder.mkdir()
        ranks = train(folder, languages, way)
        assert ranks[0].size == 6 * 16 + 16 + 16 * 3 + 3
        assert ranks[0].tobytes() == ranks[1].tobytes(), languages
        results.append(ranks[0].tobytes())
    assert results[0] == results[1] == results[2]
