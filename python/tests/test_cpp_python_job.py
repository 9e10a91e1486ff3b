"""A C++ program and a Python program are ranks of one job and train the same model."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import package_support
import pytest

PYTHON_RANK = """
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
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
if sys.argv[2] == "larc":
    optimizer = LARC(optimizer)
for step in range(6):
    x = torch.sin(torch.arange(48, dtype=torch.float32).view(8, 6) + (10 * step + rank))
    optimizer.zero_grad()
    (model(x) - x[:, :3]).square().mean().backward()
    optimizer.step()
with open(sys.argv[1], "wb") as file:
    for parameter in model.parameters():
        file.write(parameter.detach().numpy().tobytes())
dist.destroy_process_group()
"""


def train(tmp_path: Path, languages: list[str], optimizer: str) -> list[np.ndarray]:
    """Parameters of every rank after training; `languages` says by rank what it is written in."""
    program = package_support.cpp_program("cpp", "tests", "package", "apex_cpp_rank")
    script = tmp_path / "rank.py"
    script.write_text(PYTHON_RANK)
    commands = {"c++": f'"{program}"', "python": f'"{sys.executable}" "{script}"'}
    wrapper = tmp_path / "rank.sh"
    cases = "\n".join(
        f'  {rank}) exec {commands[language]} "{tmp_path}/parameters{rank}" {optimizer} ;;'
        for rank, language in enumerate(languages)
    )
    wrapper.write_text(f'#!/bin/sh\ncase "$RANK" in\n{cases}\nesac\n')
    wrapper.chmod(0o755)
    result = subprocess.run(
        [*package_support.torchrun(len(languages)), str(wrapper)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [
        np.fromfile(tmp_path / f"parameters{rank}", dtype=np.float32)
        for rank in range(len(languages))
    ]


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", ["sgd", "larc"])
def test_job_of_cpp_and_python_ranks_parameters_bitwise_equal(
    tmp_path: Path, optimizer: str
) -> None:
    # Rank 0's seed decides the first parameters, whatever it is written in.
    results = []
    for languages in (["c++", "python"], ["python", "c++"], ["python", "python"]):
        folder = tmp_path / "-".join(languages)
        folder.mkdir()
        ranks = train(folder, languages, optimizer)
        assert ranks[0].size == 6 * 16 + 16 + 16 * 3 + 3
        assert ranks[0].tobytes() == ranks[1].tobytes(), languages
        results.append(ranks[0].tobytes())
    assert results[0] == results[1] == results[2]
