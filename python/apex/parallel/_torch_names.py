# SPDX-License-Identifier: BSD-3-Clause
"""Undocumented names of torch's DistributedDataParallel that libraries use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from apex._internal.groups import backends_of
from apex.parallel._engine import Engine

#: The attribute in which torch keeps the names of ignored parameters and buffers.
IGNORED = "_ddp_params_and_buffers_to_ignore"


class NoReducer:
    """The object at ``DistributedDataParallel.reducer``. It has no attributes of torch's
    reducer."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            "apex.parallel.DistributedDataParallel has no torch reducer and therefore no "
            f"{name!r}: bucket_plan() and statistics() describe its buckets, and "
            "load_bucket_plan() and rebuild_buckets() change them."
        )


def ignore(module: nn.Module, params_and_buffers: Iterable[str]) -> None:
    """Record in `module` that its wrapper must ignore these parameters and buffers."""
    names = list(params_and_buffers)
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"the module has no parameter or buffer {unknown[0]!r} to ignore.")
    setattr(module, IGNORED, names)


def logging_data(wrapper: Any) -> dict[str, Any]:
    """Options and counts of `wrapper` under torch's names."""
    group, parameters = wrapper.process_group, wrapper._engine.parameters
    return {
        "module_name": type(wrapper.module).__name__,
        "backend_name": dist.get_backend(group) if backends_of(group) else group.name(),
        "world_size": dist.get_world_size(group),
        "rank": group.rank(),
        "broadcast_buffers": int(wrapper.broadcast_buffers),
        "find_unused_parameters": 1,
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "static_graph": int(wrapper.static_graph),
        "can_set_static_graph": 0,
        "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
    }


class TorchNames:
    """Base class of the wrapper: names that libraries expect on torch's class."""

    _engine: Engine

    @property
    def broadcast_buffers(self) -> bool:
        """Whether training forwards broadcast rank 0's buffers; may be set."""
        return self._engine.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, on: bool) -> None:
        self._engine.broadcast_buffers = bool(on)

    #: The same, under torch's newer name.
    forward_sync_buffers = broadcast_buffers

    #: False: training forwards never broadcast buffers, whatever ``broadcast_buffers`` is.
    require_forward_param_sync: bool = True
    #: torch's wrapper has a C++ logger here, or None.
    logger: None = None

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Make a wrapper of `module` ignore these parameters and buffers. Call it before wrapping.

        They are not compared, broadcast or averaged. Names are as in ``named_parameters()`` and
        ``named_buffers()``, and must be the same on every rank.
        """
        ignore(module, params_and_buffers_to_ignore)

    def _remove_autograd_hooks(self) -> None:
        """From now on, backward does not communicate; see :meth:`disable_allreduce`."""
        wrapper: Any = self
        wrapper.disable_allreduce()

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, comm_hook_location: Any = None
    ) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "apex.parallel.DistributedDataParallel has no hooks for buffers: "
            "broadcast_buffers=True copies rank 0's buffers before each training forward; for "
            "anything else reduce `module.buffers()` with torch.distributed after backward, on "
            "every rank."
        )

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Options and counts under torch's names, and :meth:`statistics`."""
        wrapper: Any = self
        return {**logging_data(self), **wrapper.statistics()}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """No effect: every backward is counted, see :meth:`record_overlap`."""

    @property
    def reducer(self) -> NoReducer:
        """A placeholder for torch's reducer, whose errors name the alternatives."""
        return NoReducer()
