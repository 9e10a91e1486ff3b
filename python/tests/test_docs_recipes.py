# SPDX-License-Identifier: BSD-3-Clause
"""The recipes of docs/recipes.md on two ranks with different seeds (test_docs_snippets.py: on one).

References: every wrapped model is bitwise equal on both ranks. With a loss over the whole batch,
the parameters equal those that one process gets from all samples in float64. Counts add up.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, check, check_equal, check_same_on_all_ranks

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
TEXT = PAGE.read_text().partition("\n## Libraries")[0]
RECIPES = dict(re.findall(r"^## (.*?)\n.*?^```python\n(.*?)^```$", TEXT, re.M | re.S))


def _run(code: str, rank: int, folder: str) -> dict[str, Any]:
    """Run a recipe in this rank's group, with its files in `folder`. Returns its variables."""
    names: dict[str, Any] = {}
    torch.manual_seed(100 + rank)
    code = re.sub(r'"(best\.pt)', rf'"{folder}/\1', code)
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def _agrees(rank: int, world: int, code: str, folder: str) -> None:
    names = _run(code, rank, folder)
    wrapped = [one for one in names.values() if isinstance(one, DistributedDataParallel)]
    check(bool(wrapped), "the recipe wraps nothing")
    parameters = [p for model in wrapped for p in model.parameters()]
    check_same_on_all_ranks(parameters, "parameters")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_leaves_ranks_alike(ranks: RankPool, recipe: str, tmp_path: Path) -> None:
    ranks.run(2, _agrees, RECIPES[recipe], str(tmp_path))
    if "CSV" in recipe:
        assert {file.name for file in tmp_path.iterdir()} == {"log.csv", "runs.txt"}
    if recipe == "Keep the best model":
        assert [file.name for file in tmp_path.iterdir()] == ["best.pt"]
        assert set(torch.load(tmp_path / "best.pt")) == {"weight", "bias"}


def _counts_all(rank: int, world: int, code: str) -> None:
    check_equal(int(_run(code, rank, "")["counts"][1]), 101, "samples")


def test_evaluation_recipe_counts_every_sample_once(ranks: RankPool) -> None:
    ranks.run(2, _counts_all, RECIPES["Evaluate on all ranks"])
