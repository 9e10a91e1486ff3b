# SPDX-License-Identifier: BSD-3-Clause
"""The options ``device_ids`` and ``output_device``: a process drives one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from apex._internal.tree import map_tensors


def single_device(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Sequence[nn.Parameter],
) -> tuple[torch.device | None, torch.device | None]:
    """The devices that inputs and outputs are moved to; None: they are not moved.

    A module on the CPU stays there for any device_ids, so that a script written for GPUs runs on a
    host without them. A negative index comes from a --local_rank that was not passed, as under
    torchrun. It means the device of the module.
    """
    if isinstance(device_ids, (int, str, torch.device)):
        raise TypeError(
            f"device_ids must be a list with the one device of this process, got {device_ids!r}: "
            f"pass device_ids=[{device_ids!r}]."
        )
    if not device_ids:
        if output_device is not None:
            raise ValueError("output_device needs device_ids=[the device of this process].")
        return None, None
    if len(device_ids) > 1:
        raise ValueError(
            f"device_ids names {len(device_ids)} devices, but a process uses only one: start one "
            "process per device (torchrun --nproc_per_node=N) and pass device_ids=[its device]."
        )
    devices = {parameter.device for parameter in parameters}
    if devices <= {torch.device("cpu")}:
        return None, None
    if len(devices) > 1:
        raise ValueError(
            f"the module's parameters are on {len(devices)} devices "
            f"({', '.join(sorted(map(str, devices)))}): for a module split over devices leave out "
            "device_ids and output_device."
        )
    own = next(iter(devices))

    def named(device: int | torch.device) -> torch.device:
        if not isinstance(device, int):
            return torch.device(device)
        return own if device < 0 else torch.device(own.type, device)

    return named(device_ids[0]), None if output_device is None else named(output_device)


def move(value: Any, device: torch.device) -> Any:
    """Move tensors in nested containers, and objects that have a ``to()``, to ``device``."""
    return map_tensors(
        value,
        lambda tensor: tensor.to(device, non_blocking=True),
        lambda other: other.to(device) if callable(getattr(other, "to", None)) else other,
    )
