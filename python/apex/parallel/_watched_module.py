# SPDX-License-Identifier: BSD-3-Clause
"""Detects whether a wrapped module still has the parameters that its engine was created for."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from apex import _core

# Note [Tensors that functional_call puts in place]
#
# torch.func.functional_call(wrapper, tensors, ...) replaces entries of the module for one forward.
# They look like replaced parameters, and may even be nn.Parameters. But they belong to the caller,
# may be computed, may differ between ranks, and are removed after forward. So they do not count as
# a change of the module, and nothing is written to them. Unlike permanently replaced parameters,
# they exist only while forward runs inside functional_call.
_FUNCTIONAL_CALL = stateless._functional_call.__code__


def tensors_of_functional_call() -> dict[int, object]:
    """The tensors by which the running functional_call() has replaced a module's own, by id."""
    tensors: dict[int, object] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTIONAL_CALL:
            values = frame.f_locals["parameters_and_buffers"].values()
            tensors.update((id(tensor), tensor) for tensor in values)
        frame = frame.f_back
    return tensors


def included_parameters(
    module: nn.Module, ignored: Collection[str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a wrapper synchronizes: all but those named in `ignored`."""
    return ((name, p) for name, p in module.named_parameters() if name not in ignored)


class WatchedModule:
    """The parameters of a wrapper's module, with a cheap check whether they have changed.

    Only the parameters count. The replacement of a submodule without parameters is detected, but is
    no change. The wrapper's own entry is watched too, so ``wrapper.module = other`` is detected.

    Args:
        wrapper: referenced weakly.
        ignored: names of parameters that do not count.

    Attributes:
        parameters: the synchronized parameters, in the engine's order.
    """

    def __init__(self, wrapper: weakref.ref[nn.Module], ignored: Collection[str]) -> None:
        self._wrapper: Callable[[], Any] = wrapper
        self._ignored = ignored
        self.parameters = self._present()
        if self._are_borrowed(self.parameters):
            raise RuntimeError(
                "this DistributedDataParallel has no engine yet, and in functional_call() it "
                "cannot see the module's own parameters: run one forward of the wrapper itself "
                "first, on every rank."
            )
        self._look()

    def _present(self) -> list[nn.Parameter]:
        return [p for _, p in included_parameters(self._wrapper().module, self._ignored)]

    @staticmethod
    def _are_borrowed(parameters: list[nn.Parameter]) -> bool:
        tensors = tensors_of_functional_call()
        return any(id(parameter) in tensors for parameter in parameters)

    def _look(self) -> None:
        parts = list(self._wrapper().modules())
        plain = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
        # Scripted modules do not keep parameters in Python dictionaries, so they are listed each
        # time.
        self._has_scripted = len(plain) < len(parts)
        self._watch = _core.ModuleWatch(
            [members for part in plain for members in (part._parameters, part._modules)]
        )

    def has_other_parameters(self) -> bool:
        """Whether parameters were permanently added, removed, reordered or replaced.

        Costs nanoseconds per parameter if nothing was replaced and no module is scripted.
        """
        changed = self._watch.changed()
        if not (changed or self._has_scripted):
            return False
        present = self._present()
        if len(present) == len(self.parameters) and all(
            new is old for new, old in zip(present, self.parameters, strict=True)
        ):
            if changed:
                self._look()
            return False
        return not self._are_borrowed(present)
