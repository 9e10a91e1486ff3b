# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of apex.amp."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ddp_support import forget_amp

from apex.amp import _amp_state


@pytest.fixture(autouse=True)
def fresh_amp() -> Iterator[None]:
    """Undo level O1 after each test."""
    torch.manual_seed(0)
    before = _amp_state.hard_override, _amp_state.allow_incoming_model_not_fp32
    yield
    _amp_state.hard_override, _amp_state.allow_incoming_model_not_fp32 = before
    forget_amp()


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations. ``_local_scalar_dense`` is the one that copies a number to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))
