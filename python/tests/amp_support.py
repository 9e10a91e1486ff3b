"""What the tests of apex.amp share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ddp_support import forget_amp, shared_pool

from apex.amp import _amp_state

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.cuda),
]


@pytest.fixture(autouse=True)
def fresh_amp(request: pytest.FixtureRequest) -> Iterator[None]:
    """Undo level O1 after each test, and skip CUDA tests where there is no device."""
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    _amp_state.hard_override = False
    _amp_state.allow_incoming_model_not_fp32 = False
    yield
    forget_amp()


def run_ranks(world: int, body: Callable[..., None], *args: Any) -> None:
    """Run ``body(rank, *args)`` in `world` processes joined by Gloo; fails if one fails."""
    shared_pool().run(world, _without_world, body, args)


def _without_world(rank: int, world: int, body: Callable[..., None], args: Any) -> None:
    body(rank, *args)
