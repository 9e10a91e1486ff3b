# SPDX-License-Identifier: BSD-3-Clause
"""The Python code in the guides runs as it is printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from ddp_support import free_port
from warm import run_script

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("amp.md", "distributed_data_parallel.md", "migration.md", "sync_batch_norm.md")

#: What a block takes for granted: names that the text around it introduces.
GIVEN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(2, 1, 4, 4), torch.randint(16, (2,))) for _ in range(2)]
criterion = torch.nn.CrossEntropyLoss()
"""
#: First lines of the blocks that are whole programs.
STANDALONE = ("import apex", "import json", "import torch", "import os", "import argparse")


def blocks() -> list[object]:
    found = []
    for page in PAGES:
        text = (DOCS / page).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            line = text[: match.start()].count("\n") + 2
            found.append(pytest.param(match[1], id=f"{page}:{line}"))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("code", blocks())
def test_docs_python_block_runs(code: str, tmp_path: Path) -> None:
    port = free_port()
    script = tmp_path / "block.py"
    alone = code.startswith(STANDALONE)
    source = ("" if alone else GIVEN) + code + ("" if alone else "\ndist.destroy_process_group()\n")
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


def test_docs_blocks_are_found() -> None:
    assert len(blocks()) >= 8
    assert {str(block.id).partition(":")[0] for block in blocks()} == set(PAGES)


def test_docs_links_lead_to_pages_and_headings() -> None:
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#:]*\.md)?#?([^):]*)\)", prose):
            file = DOCS / (target[0] or page)
            assert file.is_file(), f"{page}: there is no {target[0]}"
            if target[1]:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
                anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
                assert target[1] in anchors, f"{page}: {file.name} has no heading #{target[1]}"


def test_docs_paths_of_examples_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"`((?:examples|benchmarks)/[\w./-]+)`", (DOCS / page).read_text()):
            assert (DOCS.parent / path).exists(), f"{page}: there is no {path}"


def test_docs_code_from_sources_is_theirs() -> None:
    """What `<!-- FILE -->` stands above is a part of FILE, which the tests compile and run."""
    text = (DOCS / "extending.md").read_text()
    found = re.findall(r"^<!-- (\S+) -->\n```cpp\n(.*?)^```$", text, re.M | re.S)
    assert len(found) == text.count("```cpp") >= 5
    for file, code in found:
        source = re.sub(r"^ +", "", (DOCS.parent / file).read_text(), flags=re.M)
        assert re.sub(r"^ +", "", code, flags=re.M) in source, f"not in {file}:\n{code}"
    for target in re.findall(r"\]\((\.\./[^)]*)\)", text):
        assert (DOCS / target).is_file(), target
