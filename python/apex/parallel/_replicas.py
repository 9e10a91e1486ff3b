# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that were loaded are compared in the next backward; see Note [Replicas] in C++."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class OnLoad:
    """Called before a module loads a state dict: the next backward then compares all
    parameters.

    A saved module must load without this package, and a copied one has another engine. So it is
    pickled and copied as a built-in function that takes any arguments and has no effect.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, *_: Any) -> None:
        engine = self._engine()
        if engine is not None:
            engine.check_replicas_next()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("", "format")


def watch_loads(engine: Any) -> None:
    """Register OnLoad with the module, until the engine is destroyed. Not if it is scripted."""
    if isinstance(engine.module, torch.jit.ScriptModule):
        return
    handle = engine.module._register_load_state_dict_pre_hook(OnLoad(engine))
    weakref.finalize(engine, handle.remove).atexit = False
