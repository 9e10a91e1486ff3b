# SPDX-License-Identifier: BSD-3-Clause
"""The parameters of a wrapped module, and whether it still has those of its engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from apex import _core
from apex._internal import not_served


def included_parameters(
    module: nn.Module, ignored: Collection[str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a wrapper synchronizes: all but those named in `ignored`."""
    return ((name, p) for name, p in module.named_parameters() if name not in ignored)


def check_initialized(module: nn.Module) -> None:
    """Raise RuntimeError if a parameter or buffer of a lazy module has no shape yet."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise RuntimeError(
                f"'{name}' belongs to a lazy module and has no shape yet: run one forward of the "
                "module, on every rank, before it is wrapped."
            )


def names_of(triggers: Iterable[nn.Parameter], module: nn.Module) -> list[str]:
    """The names of ``allreduce_trigger_params``, which also identify later replacements."""
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    result = [names.get(id(trigger), "") for trigger in triggers]
    if "" in result:
        raise ValueError(
            "allreduce_trigger_params holds a tensor that is not a trainable parameter of the "
            "wrapped module."
        )
    return result


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
        if not all(isinstance(parameter, nn.Parameter) for parameter in self.parameters):
            not_served.refuse("torch.func.functional_call(DistributedDataParallel, ...)")
        self._look()

    def _present(self) -> list[nn.Parameter]:
        return [p for _, p in included_parameters(self._wrapper().module, self._ignored)]

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
        if list(map(id, self._present())) != list(map(id, self.parameters)):
            return True
        if changed:
            self._look()
        return False
