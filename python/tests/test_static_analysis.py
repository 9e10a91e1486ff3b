# SPDX-License-Identifier: BSD-3-Clause
"""The static analysis of scripts/analyze.sh finds nothing here. clang-tidy takes too long."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ruff", "ruff-format", "clang-format", "shellcheck", "codespell", "mypy", "sphinx")
LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]


def why_not() -> str:
    """Why these tests cannot run here; empty if they can."""
    if shutil.which("git") is None:
        return "there is no git here"
    # Newer versions refuse another user's checkout. An unpacked archive has none.
    asked = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True)
    return "".join(asked.stderr.splitlines()[:1])


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.parametrize("tool", TOOLS)
def test_analyze_this_repository_finds_nothing(tool: str) -> None:
    if tool == "mypy" and not torch.__version__.startswith(("2.13.", "2.15.")):
        pytest.skip("types are checked with torch 2.13 and 2.15")
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "analyze.sh"), tool],
        cwd=ROOT,
        # Tools next to this Python are found first, for any name of the environment.
        env={**os.environ, "APEX_VENV": str(Path(sys.executable).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    summary = done.stdout.splitlines()[-1]
    if "not installed" in summary:
        pytest.skip(f"{summary}; scripts/analyze.sh --install {tool} installs it")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{tool} +passed \(\d+ s\)$", summary), done.stdout + done.stderr


def test_every_source_names_its_license() -> None:
    listed = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True, check=True)
    sources = [
        ROOT / name
        for name in listed.stdout.splitlines()
        if re.search(r"(^|/)CMakeLists\.txt$|\.(py|sh|cmake|cpp|h|cu|cuh)(\.in)?$", name)
    ]
    tag = "SPDX-License-Identifier: BSD-3-Clause"
    assert len(sources) > 200
    assert [s for s in sources if s.exists() and tag not in s.read_text()[:200]] == []
