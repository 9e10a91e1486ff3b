"""Which of torch's implementations an alias can use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def as_list(params: Iterable[Any]) -> list[Any]:
    """`params`, which may be a generator, as a list."""
    return list(params)


def implementation(params: list[Any]) -> dict[str, bool]:
    """``{"fused": True}`` where torch has a fused kernel for all `params`, else foreach."""
    tensors: list[torch.Tensor] = []
    for entry in params:
        members = entry["params"] if isinstance(entry, dict) else [entry]
        if isinstance(members, torch.Tensor):
            members = [members]
        elif isinstance(entry, dict) and not isinstance(members, (list, tuple)):
            members = entry["params"] = list(members)
        tensors += [member[1] if isinstance(member, tuple) else member for member in members]
    fused = all(
        tensor.is_floating_point() and tensor.device.type in _FUSED_DEVICES for tensor in tensors
    )
    return {"fused": True} if fused else {"foreach": True}
