# SPDX-License-Identifier: BSD-3-Clause
"""What DistributedDataParallel.weight() returns."""

from __future__ import annotations

import numbers

import torch

from apex import _core


class Weight:
    """A context in which backwards are of samples with a weight."""

    __slots__ = ("_reducer", "_weight")

    def __init__(self, reducer: _core.Reducer, weight: float | torch.Tensor) -> None:
        self._reducer = reducer
        self._weight = weight

    def __enter__(self) -> None:
        weight = self._weight
        if isinstance(
            weight, numbers.Real
        ):  # without a tensor, which would cost several times that
            weight = float(weight)
        elif not isinstance(weight, torch.Tensor):
            weight = torch.tensor(weight, dtype=torch.float64, device="cpu")
        self._reducer.begin_weight(weight)

    def __exit__(self, *error: object) -> None:
        self._reducer.end_weight()
