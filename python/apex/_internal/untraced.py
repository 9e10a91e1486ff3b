# SPDX-License-Identifier: BSD-3-Clause
"""Code that torch.compile and torch.jit.trace do not trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# The dispatch key that is active while a transform of torch.func runs. Querying torch._C._functorch
# would initialize thread state, which torch would then copy to every thread of every backward.
_IN_TRANSFORM = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
#: The dispatch keys outside of traces, transforms and modes.
_PLAIN = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


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


def in_transform() -> bool:
    """Whether a transform of torch.func runs."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_IN_TRANSFORM)


@contextlib.contextmanager
def outside_traces() -> Iterator[None]:
    """Context in which operators are not recorded by torch.jit.trace, transformed or intercepted by
    a mode. Process groups may be created inside of these."""
    jit: Any = torch._C
    tracing = jit._get_tracing_state()
    jit._set_tracing_state(None)
    try:
        with torch._C._ForceDispatchKeyGuard(*_PLAIN):
            yield
    finally:
        jit._set_tracing_state(tracing)
