# SPDX-License-Identifier: BSD-3-Clause
"""The constructor arguments of DistributedDataParallel: parsing, validation and conflicts between
them."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from apex._internal.groups import backend_name, backends_of, group_like
from apex._internal.tree import map_tensors

#: Elements, NVIDIA Apex's default. This value means "by device", see BucketLimits in C++.
MESSAGE_SIZE = 10_000_000
#: Boolean attributes of the wrapper that the engine has under the same names.
SWITCHES_OF_THE_ENGINE = (
    "delay_allreduce", "gradient_as_bucket_view", "allreduce_always_fp32", "static_graph",
    "check_finite", "registered_buffers",
)  # fmt: skip
CPU_BUCKET_BYTES = 8 << 20
FIRST_BUCKET_BYTES = 1 << 20  # torch's default for the first bucket


def third_behind_device_ids(device_ids: Sequence[Any] | None, third: Any, fourth: Any) -> bool:
    """Return delay_allreduce of ``(module, device_ids, third, fourth)``, torch's order.

    The third argument is Apex's delay_allreduce, or None, which is torch's output_device. A device
    index there raises TypeError: it would mean True on rank 1 and False on rank 0.
    """
    if third is None and fourth is not None:
        raise TypeError(
            f"the fourth positional argument is shared_param, not torch's dim, and got {fourth!r}: "
            "pass torch's arguments behind output_device by keyword."
        )
    if third is not None and not isinstance(third, bool):
        devices = None if device_ids is None else list(device_ids)
        raise TypeError(
            f"the third positional argument is delay_allreduce, not torch's output_device, and got "
            f"{third!r}: pass device_ids={devices!r}, output_device={third!r} by keyword."
        )
    return bool(third)


def switch(name: str, value: Any) -> bool:
    """The option `name` as a bool. Old scripts also pass 0 and 1."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}.")


def average(value: Any) -> bool | Literal["weighted"]:
    """The option ``gradient_average``."""
    if isinstance(value, str):
        if value != "weighted":
            raise ValueError(f"gradient_average must be True, False or 'weighted', got {value!r}.")
        return "weighted"
    return switch("gradient_average", value)


def checks_every(value: Any) -> int | None:
    """The option ``replica_check_every``."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(
        f"replica_check_every must be a number of steps, 0 (never) or None, got {value!r}."
    )


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """The option `name`, which must be one of `choices`."""
    if value in choices:
        return str(value)
    known = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
    raise ValueError(f"{name} must be {known}, got {value!r}.")


def positive_message_size(message_size: Any) -> int:
    """The option ``message_size``. Old scripts also pass ``1e9`` and ``float("inf")``."""
    if isinstance(message_size, bool) or not isinstance(message_size, numbers.Real):
        raise TypeError(
            f"message_size is a number of elements, got {type(message_size).__name__}; pass "
            "device_ids and the other arguments of torch.nn.parallel.DistributedDataParallel by "
            "keyword."
        )
    elements = float(message_size)
    if not elements > 0:
        raise ValueError(f"message_size must be positive, got {message_size}.")
    return max(1, int(min(elements, sys.maxsize)))


def _check_mebibytes(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of MiB, got {value!r}.")
    if not float(value) > 0:
        raise ValueError(f"{name} must be positive, got {value}.")


def _bytes(mebibytes: float) -> int:
    """The size in bytes, limited to the engine's range: from 1 to the largest integer."""
    return int(max(1, min(mebibytes * (1 << 20), sys.maxsize)))


def bucket_caps(caps_mb: Sequence[float]) -> tuple[float, int]:
    """The bucket size in MiB, and the size of the first bucket in bytes."""
    for cap_mb in caps_mb:
        _check_mebibytes("bucket_cap_mb_list", cap_mb)
    return max(caps_mb), _bytes(caps_mb[0])


def bucket_limits(
    message_size: int, bucket_cap_mb: float | None, first_bytes: int
) -> dict[str, Any]:
    """The bucket sizes, as arguments of the engine."""
    if bucket_cap_mb is None:
        return {"cap": given_elements(message_size) or 0}
    cap = _bytes(bucket_cap_mb)
    return {"cap": cap, "first_cap": min(cap, first_bytes), "cap_in_bytes": True}


def settings(**options: tuple[Any, Any]) -> list[str]:
    """The options ``(value, default)`` that differ from their defaults, as text.

    Ranks may be written in C++, which does not have these options and always uses the defaults.
    """
    return [f"{name}={v}" for name, (v, default) in options.items() if v != default]


def given_elements(message_size: int) -> int | None:
    """The bucket size in elements; None if it depends on the device."""
    return None if message_size == MESSAGE_SIZE else message_size


def check_size(message_size: int, bucket_cap_mb: float | None) -> None:
    """Raise ValueError unless at most one of them sets the bucket size."""
    if bucket_cap_mb is None:
        return
    _check_mebibytes("bucket_cap_mb", bucket_cap_mb)
    if message_size != MESSAGE_SIZE:
        raise ValueError(
            "message_size (elements) and bucket_cap_mb (MiB) both set the bucket size: pass only "
            "one of them."
        )


def check_streams(count: int, communicators: Any, delay_allreduce: bool) -> None:
    """Raise ValueError for contradictory numbers of communicators."""
    if not isinstance(count, int):
        raise TypeError(f"num_allreduce_streams must be an integer, got {count!r}.")
    if delay_allreduce and count > 1:
        raise ValueError(
            "delay_allreduce launches every bucket at the end of backward, so "
            "num_allreduce_streams > 1 has no effect: pass only one of them."
        )
    if count < 1:
        raise ValueError(f"num_allreduce_streams must be at least 1, got {count}.")
    if communicators is None:
        return
    if count == 1:
        raise ValueError(
            "allreduce_communicators needs num_allreduce_streams > 1, the number of groups."
        )
    groups, streams = communicators
    if len(groups) != count or len(streams) != count:
        raise ValueError(
            f"allreduce_communicators holds {len(groups)} groups and {len(streams)} streams, but "
            f"num_allreduce_streams is {count}: pass {count} of each."
        )


def check_initialized(module: nn.Module) -> None:
    """Raise RuntimeError if a parameter or buffer of a lazy module has no shape yet."""
    for kind, named in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, tensor in named:
            if nn.parameter.is_lazy(tensor):
                raise RuntimeError(
                    f"{kind} '{name}' belongs to a lazy module and has no shape yet: run one "
                    "forward of the module, on every rank, before it is wrapped."
                )


def trigger_names(triggers: Iterable[nn.Parameter] | None, module: nn.Module) -> list[str]:
    """The names of the given parameters, which also identify their later replacements."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    result = []
    for trigger in triggers or ():
        if id(trigger) not in names:
            raise ValueError(
                f"allreduce_trigger_params holds a tensor of shape {tuple(trigger.shape)} that is "
                "not a parameter of the wrapped module."
            )
        name = names[id(trigger)]
        if not trigger.requires_grad:
            raise ValueError(
                f"allreduce_trigger_params holds '{name}', which does not require a gradient."
            )
        result.append(name)
    return result


def single_device(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Sequence[nn.Parameter],
) -> tuple[torch.device | None, torch.device | None]:
    """The devices that inputs and outputs are moved to; None: they are not moved.

    A process drives one device. A module on the CPU stays there for any device_ids, so that a
    script written for GPUs runs on a host without them. A negative index comes from a --local_rank
    that was not passed, as under torchrun. It means the device of the module.
    """
    if isinstance(device_ids, (int, str, torch.device)):
        raise TypeError(
            f"device_ids must be a list with the one device of this process, got {device_ids!r}: "
            f"pass device_ids=[{device_ids!r}]."
        )
    if device_ids is None or len(device_ids) == 0:
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


def over_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on ``device`` go over Gloo, or over the backend ``apex``, which uses Gloo."""
    return backend_name(group, device) in ("gloo", "apex")


def communicators(
    count: int, given: Any, group: dist.ProcessGroup, device: torch.device
) -> list[dist.ProcessGroup]:
    """The groups that buckets on ``device`` use in turn.

    Over Gloo, the engine creates separate connections from these groups. For other backends, this
    function creates new groups. Only the members of ``group`` take part.
    """
    if count == 1:
        return [group]
    if given is not None:
        return list(given[0])
    if over_gloo(group, device):
        return [group] * count
    if not backends_of(group):
        raise ValueError(
            "num_allreduce_streams > 1 needs more process groups, which cannot be created for a "
            "process_group whose class is written in Python: pass them as allreduce_communicators."
        )
    return [group, *(group_like(group) for _ in range(count - 1))]


def move(value: Any, device: torch.device) -> Any:
    """Move tensors in nested containers, and objects that have a ``to()``, to ``device``."""
    return map_tensors(
        value,
        lambda tensor: tensor.to(device, non_blocking=True),
        lambda other: other.to(device) if callable(getattr(other, "to", None)) else other,
    )
