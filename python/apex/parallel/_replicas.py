# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that were loaded are compared in the next backward; see Note [Replicas] in C++."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn


class OnLoad:
    """Called before a module loads a state dict: the next backward then compares all
    parameters.

    A saved module must load without this package, and a copied one has another engine. So it is
    pickled and copied as a built-in function that takes any arguments and has no effect.
    """

    __slots__ = ("_engines",)

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, engine: Any) -> None:
        """Notify ``engine`` too, as long as it exists."""
        self._engines.add(engine)

    def __call__(self, *_: Any) -> None:
        for engine in self._engines:
            if engine.reducer is not None:
                engine.reducer.check_replicas_next()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("", "format")


# The hook stays with the module. Python may destroy an engine at any time, also while a script
# iterates over the module's hooks, as copy.deepcopy() does, and a removal would end the iteration.
_hooks: weakref.WeakKeyDictionary[nn.Module, OnLoad] = weakref.WeakKeyDictionary()


def watch_loads(engine: Any) -> None:
    """Register the engine with its module's OnLoad. Not if the module is scripted."""
    module = engine.module
    if isinstance(module, torch.jit.ScriptModule):
        return
    if module not in _hooks:
        _hooks[module] = OnLoad()
        module._register_load_state_dict_pre_hook(_hooks[module])
    _hooks[module].add(engine)
