# SPDX-License-Identifier: BSD-3-Clause
"""Linters, formatters, types and documentation: the tools of scripts/analysis-requirements.txt."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import apex

ROOT = Path(__file__).resolve().parents[2]
LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
COMMANDS = {
    "ruff": ["ruff", "check", "."],
    "ruff-format": ["ruff", "format", "--check", "."],
    "clang-format": ["clang-format", "--dry-run", "--Werror", "*.cpp", "*.h", "*.cu", "*.cuh"],
    "shellcheck": ["shellcheck", "*.sh", ".ci/run"],
    "codespell": ["codespell", "--toml", "pyproject.toml", "*.py", "*.md", "*.h", "*.cpp", "*.sh"],
    "mypy": ["mypy", "--config-file", "pyproject.toml", "-p", "apex"],
    "sphinx": ["sphinx-build", "-W", "--keep-going", "-E", "-q", "docs", "build/docs"],
}  # fmt: skip


def listed(*patterns: str) -> list[str]:
    """The files of the repository, committed or new."""
    done = subprocess.run([*LISTED, "--", *patterns], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:  # another user's checkout, or an unpacked archive
        pytest.skip(done.stderr.splitlines()[0])
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


@pytest.mark.parametrize("tool", COMMANDS)
def test_tool_finds_nothing(tool: str) -> None:
    if tool == "mypy" and not torch.__version__.startswith(("2.13.", "2.15.")):
        pytest.skip("types are checked with torch 2.13 and 2.15")
    program, *arguments = COMMANDS[tool]
    found = shutil.which(program, path=str(Path(sys.executable).parent))  # of the pinned version
    if found is None:
        pytest.skip(f"{program} is not installed: see scripts/analysis-requirements.txt")
    command = [found]
    for argument in arguments:
        command += listed(argument) if argument.startswith("*.") else [argument]
    editable = ROOT in Path(apex.__file__).parents  # mypy looks for others among the installed ones
    env = {**os.environ, "MYPYPATH": "python" if editable else ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
