# SPDX-License-Identifier: BSD-3-Clause
"""examples/syncbn: trained on 2 and 4 ranks, a CNN follows the one-process curve."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
from ddp_support import free_port
from warm import run_script, run_script_on_ranks

MAIN = pathlib.Path(__file__).parents[2] / "examples" / "syncbn" / "main.py"
# Against hangs only.
TIMEOUT_S = 600


def _run(folder: pathlib.Path, ranks: int) -> dict:
    output = folder / f"{ranks}.json"
    small = ("--steps", "20", "--batch", "30", "--double", "--output", str(output))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ranks == 1:
        result = run_script(MAIN, *small, cwd=folder, env=env, timeout_s=TIMEOUT_S)
    else:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        result = run_script_on_ranks(ranks, MAIN, *small, cwd=folder, env=env, timeout_s=TIMEOUT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(output.read_text())


@pytest.mark.processes
@pytest.mark.slow
def test_syncbn_example_ranks_follow_the_one_process_curve(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("sklearn")
    one = _run(tmp_path, 1)
    assert one["losses"][-1] < 0.7 * one["losses"][0]
    for ranks in (2, 4):  # 30 images on 4 ranks: slices of 8, 8, 7 and 7
        several = _run(tmp_path, ranks)
        assert several["ranks"] == ranks
        assert several["losses"] == pytest.approx(one["losses"], rel=1e-7)
        assert several["accuracy"] == one["accuracy"]
