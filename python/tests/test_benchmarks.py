# SPDX-License-Identifier: BSD-3-Clause
"""The page's tables and plots that the benchmarks make from benchmarks/results.

Nothing is measured here.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from warm import run_script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.processes
def test_performance_page_holds_every_result_as_it_is(tmp_path: Path) -> None:
    done = run_script(BENCHMARKS / "report.py", "--check", cwd=tmp_path, env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["ddp", "host_channel", "netns-1gbit", "netns-1gbit-overlapped_optimizer"]
)
def test_plot_of_a_result_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = shutil.copy(BENCHMARKS / "results" / f"{name}.json", tmp_path)
    done = run_script(BENCHMARKS / "plot.py", str(result), cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
