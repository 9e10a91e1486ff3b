# SPDX-License-Identifier: BSD-3-Clause
"""Functions that torch.compile does not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which calls the core. A graph of torch.compile breaks there.

    Calling what ``torch._disable_dynamo`` returns imports the compiler, which takes a second, so
    only compiled code calls it.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            result: R = disabled(*args, **kwargs)
            return result
        return function(*args, **kwargs)

    return chosen
