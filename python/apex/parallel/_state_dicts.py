# SPDX-License-Identifier: BSD-3-Clause
"""Adapts the keys of loaded state dicts: with or without the prefix ``module.``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

_PREFIX = "module."


def with_prefix(wrapper: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename the keys of a state dict, the wrapper's or its module's, to those of `wrapper`.

    The meaning of a key depends on the names of the module. A module that wraps another module has
    names of its own that begin with ``module.``. If all keys fit both the wrapper and the module,
    they are the wrapper's. Keys that fit neither are treated like the other keys. They may be keys
    of older versions, which the module renames while it loads.

    Raises:
        RuntimeError: if some keys fit only the wrapper and some only its module.
    """
    names = {name for name, _ in wrapper.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in wrapper.named_buffers(remove_duplicate=False)}
    own = [key for key in state_dict if key in names]
    bare = [key for key in state_dict if _PREFIX + key in names]
    if set(bare) <= set(own):
        bare = []
    elif set(own) <= set(bare):
        own = []
    if own and bare:
        bare = [key for key in bare if key not in own]
        raise RuntimeError(
            f"the state dict mixes keys with and without 'module.' in front: '{own[0]}' and "
            f"'{bare[0]}', {len(own)} and {len(bare)} of {len(state_dict)} keys. Either all keys "
            "or none of them have it."
        )
    if own or (not bare and any(key.startswith(_PREFIX) for key in state_dict)):
        return state_dict
    prefixed: OrderedDict[str, Any] = OrderedDict(
        (_PREFIX + key, value) for key, value in state_dict.items()
    )
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # Versions by module name: "" is the inner module.
        prefixed._metadata = {  # type: ignore[attr-defined]
            (_PREFIX + name).removesuffix("."): version for name, version in metadata.items()
        }
    return prefixed
