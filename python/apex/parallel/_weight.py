# SPDX-License-Identifier: BSD-3-Clause
"""The context manager that DistributedDataParallel.weight() returns."""

from __future__ import annotations

import numbers

import torch

from apex._internal.untraced import untraced
from apex.parallel._engine import Engine


class Weight:
    """A context that gives a weight to the samples of the backwards inside it.

    The module may change inside the context, so the engine may have another reducer at its end.
    """

    __slots__ = ("_engine", "_weight")

    def __init__(self, engine: Engine, weight: float | torch.Tensor) -> None:
        self._engine = engine
        self._weight = weight

    @untraced
    def __enter__(self) -> None:
        weight = self._weight
        if isinstance(weight, numbers.Real):
            # Not converted to a tensor, which would cost several times as much.
            self._engine.connected().begin_weight_number(float(weight))
            return
        if not isinstance(weight, torch.Tensor):
            weight = torch.tensor(weight, dtype=torch.float64, device="cpu")
        self._engine.connected().begin_weight(weight)

    @untraced
    def __exit__(self, *error: object) -> None:
        self._engine.connected().end_weight()
