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
from ddp_support import RankPool, check, check_equal, check_near, check_same_on_all_ranks
from torch import Tensor, nn

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


def _contrastive(draws: list[list[tuple[Tensor, Tensor]]], weight: Tensor, bias: Tensor) -> Tensor:
    """The result of one process on the samples of all ranks, with SGD at a rate of 0.1."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    for step in range(len(draws[0])):
        x = torch.cat([rank[step][0] for rank in draws])
        near = x + 0.1 * torch.cat([rank[step][1] for rank in draws])
        left, right = (nn.functional.normalize(y @ weight.T + bias, dim=1) for y in (x, near))
        loss = nn.functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(x)))
        for p, gradient in zip(
            (weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True
        ):
            p.data -= 0.1 * gradient
    return torch.cat([weight.detach().flatten(), bias.detach()])


def _is_the_loss_of_all(rank: int, world: int, code: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        names = _run(code, rank, "")
        draws = []
        for seed in range(world):
            torch.manual_seed(100 + seed)
            net = nn.Linear(10, 4)
            draws.append([(torch.randn(8, 10), torch.randn(8, 10)) for _ in range(3)])
            if seed == 0:
                first = net
        wanted = _contrastive(draws, first.weight.detach(), first.bias.detach())
        got = torch.cat([p.detach().flatten() for p in names["model"].parameters()])
        check_near(got, wanted, "the parameters")
    finally:
        torch.set_default_dtype(torch.float32)


def test_contrastive_recipe_has_the_loss_of_the_whole_batch(ranks: RankPool) -> None:
    ranks.run(2, _is_the_loss_of_all, RECIPES["Compare every sample with every other"])


def _counts_all(rank: int, world: int, code: str) -> None:
    check_equal(int(_run(code, rank, "")["counts"][1]), 101, "samples")


def test_evaluation_recipe_counts_every_sample_once(ranks: RankPool) -> None:
    ranks.run(2, _counts_all, RECIPES["Evaluate on all ranks"])


def test_recipes_are_found() -> None:
    assert len(RECIPES) == TEXT.count("```python") >= 10
