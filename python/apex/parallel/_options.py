# SPDX-License-Identifier: BSD-3-Clause
"""The constructor arguments of DistributedDataParallel: their values and contradictions."""

from __future__ import annotations

import numbers
import sys
from typing import Any, NamedTuple

from apex._internal import not_served
from apex.parallel._watched_module import names_of

#: Elements, NVIDIA Apex's default. This value means "by device", see BucketLimits in C++.
MESSAGE_SIZE = 10_000_000
#: On/off options that the engine has under the same names.
_OF_THE_ENGINE = (
    "delay_allreduce", "gradient_as_bucket_view", "allreduce_always_fp32", "static_graph",
    "check_finite",
)  # fmt: skip
_SWITCHES = (*_OF_THE_ENGINE, "retain_allreduce_buffers", "prof", "init_sync", "broadcast_buffers")
_CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES, (True, False)),
    **dict.fromkeys(("check_reduction", "forward_sync_buffers"), (True, False, None)),
    "gradient_average": (True, False, "weighted"),
    "on_failure": ("raise", "skip"),
    "on_divergence": ("raise", "warn"),
}
#: Arguments that become attributes of the wrapper.
ATTRIBUTES = (
    *_OF_THE_ENGINE, "message_size", "bucket_cap_mb", "retain_allreduce_buffers", "prof", "dim",
    "num_allreduce_streams", "gradient_average", "gradient_predivide_factor", "init_sync",
    "find_unused_parameters", "check_reduction", "on_failure", "on_divergence",
    "replica_check_every",
)  # fmt: skip
#: Options of Python that must be equal on all ranks, with the defaults that a rank in C++ has.
_SETTINGS = {"num_allreduce_streams": 1}
#: The attribute of a module in which torch keeps the names of ignored parameters and buffers.
IGNORED = "_ddp_params_and_buffers_to_ignore"


class EngineOptions(NamedTuple):
    """The options from which every reducer of a wrapper is created."""

    reducer: dict[str, Any]  # attributes of _core.ReducerOptions
    settings: list[str]  # further settings that must be equal on all ranks
    trigger_names: list[str]
    ignored: set[str]  # names of parameters and buffers that are not synchronized
    communicators: int  # the number of communicators that buckets use in turn


def check(given: dict[str, Any]) -> EngineOptions:
    """Check the constructor's arguments and replace them by their values (0 is False)."""
    _read_as_torch(given)
    for name in ("shared_param", "mixed_precision"):
        if given[name] is not None:
            not_served.refuse(f"DistributedDataParallel({name}=...)", ValueError)
    for name, choices in _CHOICES.items():
        given[name] = _one_of(name, given[name], choices)
    given["broadcast_buffers"] |= bool(given["forward_sync_buffers"])
    given["gradient_as_bucket_view"] |= given["retain_allreduce_buffers"]
    every = given["replica_check_every"]
    if every is not None and not (type(every) is int and every >= 0):
        raise ValueError(f"replica_check_every must be a number of steps or 0, got {every!r}.")
    _check_streams(given["num_allreduce_streams"], given)
    if given["device_mesh"] is not None:
        if given["process_group"] is not None:
            raise ValueError("process_group and device_mesh: pass only one of them.")
        given["process_group"] = given["device_mesh"].get_group()
    reducer = {
        **_bucket_limits(given),
        **{name: given[name] for name in _OF_THE_ENGINE},
        "gradient_average": bool(given["gradient_average"]),
        "weighted": given["gradient_average"] == "weighted",
        "gradient_predivide_factor": given["gradient_predivide_factor"],
        "check_steps": given["check_reduction"],
        "skip_failed_steps": given["on_failure"] == "skip",
        "replica_check_every": every,
        "on_divergence": given["on_divergence"],
        "begins_alike": given["init_sync"],
    }
    return EngineOptions(
        reducer,
        [f"{name}={given[name]}" for name, value in _SETTINGS.items() if given[name] != value],
        names_of(given["allreduce_trigger_params"] or (), given["module"]),
        set(getattr(given["module"], IGNORED, ())),
        given["num_allreduce_streams"],
    )


def _read_as_torch(given: dict[str, Any]) -> None:
    """Read ``(module, device_ids, output_device=None)``, the order of torch's class. A device index
    as delay_allreduce would mean True on rank 1 and False on rank 0."""
    ids, third = given["message_size"], given["delay_allreduce"]
    if given["device_ids"] is not None or not (ids is None or isinstance(ids, (list, tuple))):
        return
    if not (third is None or isinstance(third, bool)) or given["shared_param"] is not None:
        raise TypeError(
            "the third positional argument is delay_allreduce, not torch's output_device, and the "
            "fourth argument is shared_param, not torch's dim: pass "
            f"device_ids={ids and list(ids)!r}, output_device={third!r} by keyword."
        )
    given.update(device_ids=ids, message_size=MESSAGE_SIZE, delay_allreduce=bool(third))


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """The choice that equals `value`."""
    for choice in choices:
        if value is choice or (isinstance(value, (int, str)) and value == choice):
            return choice
    known = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
    kind = ValueError if type(value) in map(type, choices) else TypeError
    raise kind(f"{name} must be {known}, got {value!r}.")


def _positive(name: str, value: Any, unit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of {unit}, got {type(value).__name__}.")
    if not float(value) > 0:
        raise ValueError(f"{name} must be positive, got {value}.")
    return float(value)


def _in_range(size: float) -> int:
    """The size as an integer in the engine's range. Old scripts pass ``1e9`` and infinity."""
    return max(1, int(min(size, sys.maxsize)))


def _bucket_limits(given: dict[str, Any]) -> dict[str, Any]:
    """The bucket sizes, as attributes of ``_core.ReducerOptions``."""
    elements = _positive("message_size", given["message_size"], "elements")
    given["message_size"] = _in_range(elements)
    first_mb, caps = 1.0, given["bucket_cap_mb_list"]
    if caps:
        sizes = [_positive("bucket_cap_mb_list", cap, "MiB") for cap in caps]
        given["bucket_cap_mb"], first_mb = max(caps), sizes[0]
    if given["bucket_cap_mb"] is None:
        return {"cap": given_elements(given["message_size"]) or 0}
    cap = _in_range(_positive("bucket_cap_mb", given["bucket_cap_mb"], "MiB") * (1 << 20))
    if elements != MESSAGE_SIZE:
        raise ValueError("message_size and bucket_cap_mb: pass only one of them.")
    return {
        "cap": cap,
        "first_cap": min(cap, _in_range(first_mb * (1 << 20))),
        "cap_in_bytes": True,
    }


def given_elements(message_size: int) -> int | None:
    """The bucket size in elements; None if it depends on the device."""
    return None if message_size == MESSAGE_SIZE else message_size


def _check_streams(count: Any, given: dict[str, Any]) -> None:
    """Raise for contradictory numbers of communicators."""
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"num_allreduce_streams must be an integer of at least 1, got {count!r}.")
    if given["delay_allreduce"] and count > 1:
        raise ValueError(
            "delay_allreduce launches every bucket at the end of backward, so "
            "num_allreduce_streams > 1 has no effect: pass only one of them."
        )
    if given["allreduce_communicators"] is None:
        return
    groups, streams = given["allreduce_communicators"]
    if count == 1 or not len(groups) == len(streams) == count:
        raise ValueError(
            f"allreduce_communicators holds {len(groups)} groups and {len(streams)} streams, but "
            f"num_allreduce_streams is {count}: it must be more than 1, with that many of each."
        )
