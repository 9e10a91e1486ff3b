# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of apex.amp."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ddp_support import forget_amp

from apex.amp import _amp_state

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.cuda),
]


@pytest.fixture(autouse=True)
def fresh_amp(request: pytest.FixtureRequest) -> Iterator[None]:
    """Undo level O1 after each test, and skip CUDA tests if there is no device."""
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    _amp_state.hard_override = False
    _amp_state.allow_incoming_model_not_fp32 = False
    yield
    forget_amp()
