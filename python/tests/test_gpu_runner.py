# SPDX-License-Identifier: BSD-3-Clause
"""benchmarks/gpu/run.sh with stub commands: their order, and the files that it leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

#: Each command records its name and arguments, and acts as `do` specifies.
STUB = """#!/bin/bash
echo "$(basename "$0") $*" >>"$NOTES"
case "$(basename "$0") $*" in
{cases}
esac
"""
#: The files that each command would leave: the module and its information, and benchmark results.
LEAVES = """
  cmake*--target\\ _core*) mkdir -p "$APEX_GPU_BUILD"/python/src
    touch "$APEX_GPU_BUILD"/python/src/{_core.so,_build_info.py} ;;
  python*--name*) all="$*"; name=${all##*--name }; touch "${all##*--output }/${name%% *}.json" ;;
"""


def run(tmp_path: Path, cases: str = "") -> tuple[list[str], dict[str, str], Path]:
    """The commands that the phases called, the outcome of each phase, and the results folder."""
    bin_folder, notes, out = tmp_path / "bin", tmp_path / "notes", tmp_path / "out"
    bin_folder.mkdir()
    commands = ("cmake", "ctest", "ninja", "nvcc", "nvidia-smi", "compute-sanitizer", "python")
    for command in commands:
        (bin_folder / command).write_text(STUB.format(cases=cases + LEAVES))
        (bin_folder / command).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHON": str(bin_folder / "python"),
        "OUT": str(out), "NOTES": str(notes), "APEX_GPU_BUILD": str(tmp_path / "build"),
        "TMPDIR": str(tmp_path), "JOBS": "2", "APEX_GPU_BUILT": "",
    }  # fmt: skip
    command = ["bash", "-c", f"export RUNNER=$$; exec bash {FOLDER / 'run.sh'}"]
    subprocess.run(command, env=environment, capture_output=True, timeout=120)
    summary = (out / "gpu-summary.txt").read_text().splitlines()
    ended = {line[:12].strip(): line[13:21].strip() for line in summary[1:]}
    return notes.read_text().splitlines(), ended, out


def first(calls: list[str], *words: str) -> int:
    return next(i for i, call in enumerate(calls) if all(word in call for word in words))


def test_run_calls_what_would_hurt_most_first(tmp_path: Path) -> None:
    calls, ended, out = run(tmp_path)
    assert set(ended.values()) == {"ok"}
    order = [
        first(calls, "--target _core"),
        first(calls, "pytest", "test_sync_batch_norm.py", "-m gpu"),
        first(calls, "pytest", "test_nccl_ddp.py", "-m gpu"),
        first(calls, "compute-sanitizer --tool memcheck"),
        first(calls, "compute-sanitizer --tool racecheck"),
        first(calls, "benchmarks/sync_batch_norm.py"),
        first(calls, "benchmarks/ddp.py"),
        first(calls, "APEX_BUILD_TESTS=ON"),
        first(calls, "ctest", "-L cuda"),
    ]
    assert order == sorted(order)
    assert len(list(out.iterdir())) <= 8


def test_run_without_googletest_measures_everything(tmp_path: Path) -> None:
    _, ended, out = run(tmp_path, cases="  cmake*APEX_BUILD_TESTS=ON*) exit 1 ;;")
    assert ended["configure"] == "FAIL 1"
    for phase in ("extension", "norm", "nccl", "sync_bn", "ddp_1", "ddp_2", "overhead"):
        assert ended[phase] == "ok", phase
    assert {path.stem for path in out.glob("*.json")} == {
        "gpu-sync-batch-norm", "gpu-ddp-1", "gpu-ddp-2", "gpu-overhead", "gpu-sharded-1"
    }  # fmt: skip


def test_run_cut_off_leaves_the_results_up_to_there(tmp_path: Path) -> None:
    _, ended, out = run(tmp_path, cases="  python*--name\\ gpu-ddp-1*) kill -9 $RUNNER ;;")
    assert list(ended)[-2:] == ["sync_bn", "all"] and ended["sync_bn"] == "ok"
    assert (out / "gpu-sync-batch-norm.json").exists() and not (out / "gpu-ddp-1.json").exists()
    with tarfile.open(out / "gpu-logs.tar.gz") as logs:
        assert "gpu-logs/nccl.log" in logs.getnames()
