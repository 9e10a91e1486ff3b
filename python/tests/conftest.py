"""Fixtures shared by the tests."""

from __future__ import annotations

import pytest
from ddp_support import RankPool, close_shared_pool, shared_pool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Four processes for the whole session; ``ranks.run(world, body, *args)`` uses some of them."""
    return shared_pool()


def pytest_sessionfinish() -> None:
    close_shared_pool()
