# SPDX-License-Identifier: BSD-3-Clause
"""Which of torch's implementations an alias can use."""

from __future__ import annotations

from typing import Any

import torch

from .._internal.dtypes import is_low_precision

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def is_low_precision_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is one that torch's fused SGD gets wrong.

    Its CPU kernel skips whole vectors of float16 and bfloat16 parameters and writes wrong momenta
    (pytorch#191763; torch 2.12 and 2.13 at least). Those of Adam and AdamW are right.
    """
    return tensor.device.type == "cpu" and is_low_precision(tensor)


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


def from_apex(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """`state`, where Apex's class has saved it in the layout of torch's, for `optimizer` to load.

    Apex keeps the number of steps in the group only, and does not have torch's settings; torch
    keeps it with the parameters only.
    """
    entries = {index: dict(entry) for index, entry in state["state"].items()}
    groups = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        kept = {key: own[key] for key in own if key not in ("params", "param_names", "step")}
        group = {**kept, **saved}
        known = [entries[index] for index in group["params"] if index in entries]
        step = saved.get("step")
        steps = [int(entry["step"]) for entry in known if "step" in entry]
        if step is None and steps:
            group["step"] = max(steps)
        for entry in known if step is not None else ():
            entry.setdefault("step", torch.tensor(float(step)))
        groups.append(group)
    groups += state["param_groups"][len(groups) :]  # as many as there are: torch compares
    return {**state, "state": entries, "param_groups": groups}
