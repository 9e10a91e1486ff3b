# SPDX-License-Identifier: BSD-3-Clause
"""A store that makes a rank fail at the moment when it connects."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch.distributed as dist

CONNECTING = "apex/reducer/"  # the keys of a reducer's own connections begin with this


class StrikingStore(dist.Store):
    """Forwards everything to ``real``. Before this rank announces its address to its peers, it
    calls ``strike()``."""

    def __init__(self, real: dist.Store, strike: Callable[[], None]) -> None:
        super().__init__()
        self._real, self._strike = real, strike

    def set(self, key: str, value: bytes) -> None:
        if CONNECTING in key:
            self._strike()
        self._real.set(key, value)

    def get(self, key: str) -> bytes:
        return self._real.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._real.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._real.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self._real.check(keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._real.wait(keys) if timeout is None else self._real.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._real.delete_key(key)

    def num_keys(self) -> int:
        return self._real.num_keys()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._real.set_timeout(timeout)
