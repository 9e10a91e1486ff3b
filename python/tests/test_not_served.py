# SPDX-License-Identifier: BSD-3-Clause
"""Walks the table of what is not served: each row is triggered, and its sentence compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_support import RankPool, raises
from torch import nn
from torch.distributed.algorithms.join import Join

from apex._internal.not_served import INSTEAD
from apex.parallel import DistributedDataParallel as DDP

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
WITH_GROUP: dict[str, Callable[[], Any]] = {
    "DistributedDataParallel(mixed_precision=...)": lambda: DDP(
        nn.Linear(2, 2), mixed_precision=torch.bfloat16
    ),
    "DistributedDataParallel(shared_param=...)": lambda: DDP(nn.Linear(2, 2), shared_param=True),
    "DistributedDataParallel._register_buffer_comm_hook": lambda: DDP(
        nn.Linear(2, 2)
    )._register_buffer_comm_hook(None, print),
    "torch.distributed.algorithms.join.Join([DistributedDataParallel])": lambda: Join(
        [DDP(nn.Linear(2, 2))]
    ),
    "torch.func.functional_call(DistributedDataParallel, ...)": lambda: torch.func.functional_call(
        DDP(nn.Linear(2, 2)), {"module.weight": torch.ones(2, 2)}, (torch.ones(1, 2),)
    ),
}


def _refuses(rank: int, world: int) -> None:
    for name, call in WITH_GROUP.items():
        with raises(Exception, f"{name} is not supported: {INSTEAD[name]}."):
            call()


@pytest.mark.processes
def test_each_name_of_a_wrapper_is_refused_with_its_alternative(ranks: RankPool) -> None:
    ranks.run(2, _refuses)


def test_page_is_the_table() -> None:
    rows = [f"| `{name}` | {instead} |" for name, instead in INSTEAD.items()]
    lines = PAGE.read_text().splitlines()
    start = lines.index("## What is not served")
    assert [line for line in lines[start:] if line.startswith("| `")] == rows


def test_every_row_is_triggered() -> None:
    assert WITH_GROUP.keys() == INSTEAD.keys()
