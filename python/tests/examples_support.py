# SPDX-License-Identifier: BSD-3-Clause
"""Runs the scripts of examples/ for tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ddp_support import free_port
from warm import run_script, run_script_on_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Only a guard against hangs. Nothing here takes nearly this long.
TIMEOUT_S = 600


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without launchers' variables and GPUs, with a free port."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    port = str(free_port())
    cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    return {**kept, **cpu, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **changes}


def run(command: Sequence[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def train(
    script: str, folder: Path, *arguments: str, ranks: int = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the script without a launcher or on that many ranks, forked with torch imported (see
    warm)."""
    path, place = EXAMPLES / script, {"cwd": folder, "timeout_s": TIMEOUT_S}
    if ranks:
        return run_script_on_ranks(ranks, path, *arguments, env=environment(**env), **place)
    return run_script(path, *arguments, env=environment(**env), **place)


def assert_one_sentence(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if ".py: " in line]
    assert len(lines) == 1, done.stderr
    assert sentence in lines[0]
