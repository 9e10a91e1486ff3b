"""What the tests of apex.amp share."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

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
    """Undo level O1 after each test, and skip CUDA tests where there is no device."""
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    _amp_state.hard_override = False
    _amp_state.allow_incoming_model_not_fp32 = False
    yield
    forget_amp()


def free_port() -> int:
    """A TCP port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(rank: int, world: int, port: int, body: Callable[..., None], args: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    try:
        body(rank, *args)
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def run_ranks(world: int, body: Callable[..., None], *args: Any) -> None:
    """Run ``body(rank, *args)`` in `world` processes joined by Gloo; fails if one fails."""
    torch.multiprocessing.spawn(_rank_main, (world, free_port(), body, args), nprocs=world)
