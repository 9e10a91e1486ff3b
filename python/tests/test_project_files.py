# SPDX-License-Identifier: BSD-3-Clause
"""Workflows call scripts that exist, and the check that branches require covers every job."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_workflows_call_scripts_that_exist() -> None:
    places = [*WORKFLOWS, ROOT / "Dockerfile", ROOT / ".devcontainer" / "devcontainer.json"]
    text = "\n".join(path.read_text() for path in [*places, ROOT / ".readthedocs.yaml"])
    called = set(re.findall(r"(?:docs|scripts|\.github)/[\w-]+\.\w+|\.ci/run", text))
    assert {".ci/run", "scripts/test.sh", "scripts/release.sh"} <= called
    assert [name for name in called if not (ROOT / name).is_file()] == []


def test_workflows_pin_each_action_to_a_commit() -> None:
    used = [line for path in WORKFLOWS for line in re.findall(r"uses: .*", path.read_text())]
    assert used
    assert [line for line in used if not re.fullmatch(r"uses: \S+@[0-9a-f]{40} # v\S+", line)] == []


def test_check_that_branches_require_needs_every_job() -> None:
    jobs = (ROOT / ".github" / "workflows" / "tests.yml").read_text().partition("\njobs:\n")[2]
    names = re.findall(r"^  ([\w-]+):$", jobs, re.M)
    (needed,) = re.findall(r"^  required:\n.*?needs: \[(.*?)\]", jobs, re.M | re.S)
    assert set(needed.split(", ")) == set(names) - {"required"}
