# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.demo`` shows what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.processes
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked up in /proc")
def test_demo_names_the_rank_that_is_late_and_killed_and_writes_no_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "apex.demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 holds it up" in done.stderr
    assert "its last gradient was that of '2.bias'" in done.stderr
    assert "rank 1 has ended" in done.stdout
    assert not list(tmp_path.iterdir())
