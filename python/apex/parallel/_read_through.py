# SPDX-License-Identifier: BSD-3-Clause
"""Attributes of the wrapped module, read through its wrapper.

Note [Attributes of the wrapped module]

``model.fc`` of a wrapper is ``model.module.fc``. If the wrapper has an attribute of that name, it
takes precedence. Three kinds of names are not looked up in the module:

- Names that begin with an underscore. Libraries mark modules by attributes with such names
  (``_hf_hook``, ``_orig_mod``), and would take the wrapper for the marked module.
- ``parametrizations``. torch.nn.utils.parametrize uses it to check whether a module is
  parametrized, and then assumes that its class is a generated one.
- Any name while the module does not exist: in the constructor, and in an object that copy or pickle
  has created but not filled.

Python also calls __getattr__ if a property raises AttributeError, and drops that error. This code
raises the error again, because the name exists and the property failed.

A layer or tensor assigned to a name that only the module has would be registered in the wrapper. No
forward would use it, and its gradient would not be averaged. So this raises an error. Assigning the
module's own object has no effect: ``model.fc = model.fc.to(device)`` and ``model.offset += 1`` have
already changed it, and a second reference would become stale. Other values are set on the wrapper,
as subclasses do in their constructors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_NOT_LOOKED_UP = ("parametrizations",)


class ReadsThrough(nn.Module):
    """Base class of a wrapper of ``self.module``; see Note [Attributes of the wrapped module]."""

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        for kind in ("_modules", "_parameters", "_buffers"):
            if kind in own and name in own[kind]:
                return own[kind][name]
        if _defines(type(self), name):
            return object.__getattribute__(self, name)
        return _of_module(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, Tensor)) and _is_of_module(self, name, value):
            return
        super().__setattr__(name, value)


def _defines(kind: type, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__)


def _module_of(wrapper: nn.Module, name: str) -> nn.Module | None:
    """The module in which `name` is looked up, or None."""
    if name.startswith("_") or name in _NOT_LOOKED_UP:
        return None
    module: nn.Module | None = wrapper.__dict__.get("_modules", {}).get("module")
    return module


def _of_module(wrapper: nn.Module, name: str) -> Any:
    own = type(wrapper).__name__
    module = _module_of(wrapper, name)
    if module is None:
        raise AttributeError(f"'{own}' object has no attribute '{name}'", name=name, obj=wrapper)
    try:
        return getattr(module, name)
    except AttributeError as error:
        if not _defines(type(module), name):
            raise AttributeError(
                f"'{own}' object has no attribute '{name}', and neither has the "
                f"'{type(module).__name__}' that it wraps",
                name=name,
                obj=wrapper,
            ) from error
    return object.__getattribute__(module, name)  # raises the property's own error


def _is_of_module(wrapper: nn.Module, name: str, value: nn.Module | Tensor) -> bool:
    """Whether `value` is the module's own. Raises if it would hide another layer or tensor."""
    if name in wrapper.__dict__ or _defines(type(wrapper), name):
        return False
    held = (wrapper.__dict__.get(kind, ()) for kind in ("_modules", "_parameters", "_buffers"))
    module = _module_of(wrapper, name)
    if module is None or any(name in names for names in held):
        return False
    hidden = getattr(module, name, None)
    if isinstance(hidden, (nn.Module, Tensor)) and hidden is not value:
        raise AttributeError(
            f"'{name}' is an attribute of the '{type(module).__name__}' that this "
            f"{type(wrapper).__name__} wraps, and assigning it here would not change that: assign "
            f"to .module.{name}, on every rank."
        )
    return hidden is value
