# SPDX-License-Identifier: BSD-3-Clause
"""The Python code of README and docs/ runs as printed, and links have targets."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from ddp_support import free_port
from warm import run_script

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ("README.md", *sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")))
#: Pages with links to check: README files of examples as well.
LINKED = (
    *PAGES,
    *sorted(
        str(page.relative_to(ROOT))
        for folder in (ROOT, ROOT / "examples", ROOT / "benchmarks", ROOT / "cpp" / "examples")
        for page in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
        if page != ROOT / "README.md"
    ),
)

#: Names that a block assumes and that the text around it introduces.
GIVEN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(2, 1, 4, 4), torch.randint(16, (2,))) for _ in range(2)]
criterion = torch.nn.CrossEntropyLoss()
"""
#: First lines of blocks that are whole programs.
STANDALONE = ("import apex", "import json", "import torch", "import os", "import argparse")


def blocks() -> list[object]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            line = text[: match.start()].count("\n") + 2
            found.append(pytest.param(match[1], id=f"{page}:{line}"))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("code", blocks())
def test_docs_python_block_runs(code: str, tmp_path: Path) -> None:
    imported = r"^(?:import|from) (accelerate|lightning)\b"
    if client := re.search(imported, code, re.M):
        pytest.skip(f"needs the package {client[1]}")
    port = free_port()
    script = tmp_path / "block.py"
    alone = code.startswith(STANDALONE) or "init_process_group(" in code
    source = ("" if alone else GIVEN) + code
    if "init_process_group(" in source and "destroy_process_group()" not in source:
        source += "\ndist.destroy_process_group()\n"
    script.write_text(re.sub(r'("MASTER_PORT"\] = .*)"\d+"', rf'\1"{port}"', source))
    env = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = run_script(script, cwd=tmp_path, env=env)
    assert done.returncode == 0, f"{source}\n{done.stderr}"


def anchors(page: Path) -> set[str]:
    """The names that GitHub and MyST give to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*?)(?: #*)?$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or anchor and anchor not in anchors(file):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", LINKED)
def test_docs_links_lead_to_files_and_headings(page: str) -> None:
    assert broken_links(ROOT / page) == []


def test_docs_paths_of_examples_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"`((?:examples|benchmarks)/[\w./-]+)`", (ROOT / page).read_text()):
            assert (ROOT / path).exists(), f"{page}: there is no {path}"
