"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ddp_support import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes for the whole session; ``ranks.run(world, body, *args)`` uses some of them."""
    with RankPool(4) as pool:
        yield pool
