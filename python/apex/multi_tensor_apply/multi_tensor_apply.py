# SPDX-License-Identifier: BSD-3-Clause
"""Calls an operation on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

    Args:
        chunk_size: passed to every operation.
    """

    #: Whether all of Apex's kernels exist. They do not; see the documentation of the package.
    available = False
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any
    ) -> Any:
        """Run `op` and return its result."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
