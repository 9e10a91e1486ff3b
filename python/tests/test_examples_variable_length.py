# SPDX-License-Identifier: BSD-3-Clause
"""examples/variable_length: with weights, losses do not depend on ranks and micro-batches."""

from __future__ import annotations

import json
import os
import pathlib
import re

import pytest
from ddp_support import free_port
from warm import run_script, run_script_on_ranks

MAIN = pathlib.Path(__file__).parents[2] / "examples" / "variable_length" / "main.py"
# Against hangs only.
TIMEOUT_S = 600


def _losses(folder: pathlib.Path, ranks: int, *more: str) -> list[float]:
    output = folder / "losses.json"
    arguments = ("--steps", "26", "--output", str(output), *more)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ranks == 1:
        done = run_script(MAIN, *arguments, cwd=folder, env=env, timeout_s=TIMEOUT_S)
    else:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        done = run_script_on_ranks(
            ranks, MAIN, *arguments, cwd=folder, env=env, timeout_s=TIMEOUT_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"step (\d+): \d\.\d{4}\n", done.stdout) == ["25", "26"]
    losses: list[float] = json.loads(output.read_text())["losses"]
    return losses


@pytest.mark.processes
def test_variable_length_example_weights_make_ranks_and_micro_batches_alike(
    tmp_path: pathlib.Path,
) -> None:
    one = _losses(tmp_path, 1)
    assert one[-1] < 0.9 * one[0]
    for ranks, micro_batches in [(1, 3), (2, 1), (3, 2)]:
        several = _losses(tmp_path, ranks, "--micro-batches", str(micro_batches))
        assert several == pytest.approx(one, rel=1e-4), f"{ranks} ranks, {micro_batches} parts"
    # The negative control.
    plain = _losses(tmp_path, 3, "--micro-batches", "2", "--average", "plain")
    assert plain != pytest.approx(one, rel=5e-3)
