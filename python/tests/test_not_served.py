# SPDX-License-Identifier: BSD-3-Clause
"""Walks the table of what is not served: each row is triggered, and its sentence compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from amp_support import fresh_amp  # noqa: F401
from ddp_support import forget_amp, on_ranks, raises
from python_group import Delegate
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex._internal import joining
from apex._internal.not_served import COMMUNICATORS, INSTEAD, METHODS_OF_APEX
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import SyncBatchNorm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


def _joins(level: str) -> None:
    model = nn.Linear(2, 2)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
    )
    wrapped = DDP(model)
    try:
        with wrapped.join(), amp.scale_loss(wrapped(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
    finally:
        forget_amp()


def _overrides(name: str) -> Callable[[], Any]:
    """Wraps with a subclass that has a method that only Apex's wrapper called."""
    kind: Any = type("Own", (DDP,), {name: lambda self, *args: None})
    return lambda: kind(nn.Linear(2, 2))


def _checkpoints_alone() -> None:
    wrapped, x = DDP(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    checkpoint(wrapped.module, x, use_reentrant=True).sum().backward()


def _joins_with(layer: nn.Module) -> None:
    wrapped = DDP(nn.Sequential(layer, nn.Linear(2, 2)))
    with wrapped.join():
        for _ in range(2):
            wrapped(torch.ones(2, 2)).sum().backward()


WITH_GROUP: dict[str, Callable[[], Any]] = {
    "DistributedDataParallel(mixed_precision=...)": lambda: DDP(
        nn.Linear(2, 2), mixed_precision=torch.bfloat16
    ),
    "DistributedDataParallel(shared_param=...)": lambda: DDP(nn.Linear(2, 2), shared_param=True),
    COMMUNICATORS: lambda: DDP(
        nn.Linear(2, 2), num_allreduce_streams=2, process_group=Delegate(dist.new_group())
    ),
    "DistributedDataParallel._register_buffer_comm_hook": lambda: DDP(
        nn.Linear(2, 2)
    )._register_buffer_comm_hook(None, print),
    "DistributedDataParallel.join() with master weights or a dynamic scale of amp": lambda: _joins(
        "O2"
    ),
    **{
        f"a subclass of DistributedDataParallel with {name}()": _overrides(name)
        for name in METHODS_OF_APEX
    },
    "DistributedDataParallel.join() with SyncBatchNorm": lambda: _joins_with(SyncBatchNorm(2)),
    "DistributedDataParallel.join() with gradients kept between synchronized backwards": lambda: (
        _joins_with(nn.Linear(2, 2))
    ),
    "a backward that reaches a wrapper's parameters in a reentrant checkpoint before an output": (
        _checkpoints_alone
    ),
    "torch.distributed.algorithms.join.Join([DistributedDataParallel])": lambda: Join(
        [DDP(nn.Linear(2, 2))]
    ),
    "torch.func.functional_call(DistributedDataParallel, ...)": lambda: torch.func.functional_call(
        DDP(nn.Linear(2, 2)), {"module.weight": torch.ones(2, 2)}, (torch.ones(1, 2),)
    ),
}


HANDLE = {
    "amp.init().wrap_optimizer": lambda handle: handle.wrap_optimizer(None),
    "amp.init().scale_loss": lambda handle: handle.scale_loss(None, None),
}
NAMES = [name for name in INSTEAD if name.startswith(("apex.", "amp_C."))]


def _sentence(name: str) -> str:
    return f"{name} is not supported: {INSTEAD[name]}."


@pytest.mark.processes
@on_ranks(2)
def test_each_name_of_a_wrapper_is_refused_with_its_alternative(rank: int, world: int) -> None:
    for name, call in WITH_GROUP.items():
        with raises(Exception, _sentence(name).rstrip(".")):
            call()
    with raises(RuntimeError, _sentence(joining.WITH_AMP)):
        _joins("O1")


@pytest.mark.usefixtures("fresh_amp")
@pytest.mark.parametrize("name", HANDLE)
def test_each_name_of_the_old_handle_is_refused_with_its_alternative(name: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        HANDLE[name](amp.init())
    assert str(caught.value) == _sentence(name)


@pytest.mark.parametrize("name", NAMES)
def test_import_of_each_name_is_refused_with_its_alternative(name: str) -> None:
    package, _, member = name.rpartition(".")
    kind = AttributeError if package == "amp_C" else ImportError
    with pytest.raises(kind) as caught:
        exec(f"from {package} import {member}" if package != "amp_C" else f"import amp_C; {name}")
    assert str(caught.value) == _sentence(name)
    if package != "amp_C":
        with pytest.raises(ImportError):
            importlib.import_module(name)


def test_page_is_the_table() -> None:
    rows = [f"| `{name}` | {instead} |" for name, instead in INSTEAD.items()]
    lines = PAGE.read_text().splitlines()
    start = lines.index("## What is not served")
    assert [line for line in lines[start:] if line.startswith("| `")] == rows


def test_every_row_is_triggered() -> None:
    assert {*WITH_GROUP, *HANDLE, *NAMES} == INSTEAD.keys()
