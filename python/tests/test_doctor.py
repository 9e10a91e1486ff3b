# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.doctor``, its report and recommendations, and ``python -m apex.demo``."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from apex import doctor

GIB = 1 << 30
# At every limit.
SOUND = doctor.Host(
    gpu_files=0, gpus=(), cores=8, threads=8, available=GIB, total=20 * GIB, shm=GIB // 4
)


def run_module(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", *command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.processes
def test_a_report_on_this_host(tmp_path: Path) -> None:
    done = run_module("apex.doctor", cwd=tmp_path)
    assert f"libtorch      {torch.__version__}" in done.stdout
    assert done.stdout.count("(passed)") >= 4
    for backend in ("gloo", "apex"):
        assert f"  {backend}  4 KiB" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"batch_norm": {"float32 on cpu": (0.5, 1e-5)}}, "batch norm is wrong for float32 on cpu"),
        ({"batch_norm": {"float32 on cpu": (float("nan"), 1e-5)}}, "batch norm is wrong"),
        ({"gpu_files": 2}, "there are GPUs" if torch.version.cuda is None else "GPUs"),
        ({"shares_memory": False}, "share no memory"),
        ({"threads": 9}, "set OMP_NUM_THREADS"),
        ({"available": GIB // 4}, "0.2 GiB of memory are available"),
        ({"shm": 64 << 20}, "/dev/shm has 64 MiB"),
    ],
)
def test_each_recommendation(change: dict[str, Any], found: str) -> None:
    (one,) = doctor.recommend(dataclasses.replace(SOUND, **change))
    assert found in one


def test_wrong_batch_norm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure", lambda host: None)
    monkeypatch.setattr(
        doctor.SyncBatchNorm, "forward", lambda self, x: x * self.weight.mean() + self.bias.mean()
    )
    assert doctor.main([]) == 1


def test_failing_processes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.01)
    host = dataclasses.replace(SOUND)
    doctor.measure(host)
    assert host.problem == "two processes here: no end within 0.01 s"
    assert list(doctor.describe(host))[-1] == f"failed: {host.problem}."


@pytest.mark.processes
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked up in /proc")
def test_demo_names_the_rank_that_is_late_and_killed_and_writes_no_files(tmp_path: Path) -> None:
    done = run_module("apex.demo", cwd=tmp_path)
    assert "rank 1 holds it up" in done.stderr
    assert "its last gradient was that of '2.bias'" in done.stderr
    assert done.stdout.index("rank 1 is killed") < done.stdout.index("rank 1 has ended")
    assert not list(tmp_path.iterdir())
