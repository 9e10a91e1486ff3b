# SPDX-License-Identifier: BSD-3-Clause
"""Undocumented names of torch's DistributedDataParallel that libraries use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from apex._internal import not_served
from apex.parallel._engine import Engine

#: The attribute in which torch keeps the names of ignored parameters and buffers.
IGNORED = "_ddp_params_and_buffers_to_ignore"


def ignore(module: nn.Module, params_and_buffers: Iterable[str]) -> None:
    """Record in `module` that its wrapper must ignore these parameters and buffers."""
    names = list(params_and_buffers)
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"the module has no parameter or buffer {unknown[0]!r} to ignore.")
    setattr(module, IGNORED, names)


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
        not_served.refuse("DistributedDataParallel._register_buffer_comm_hook")

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError; torch's Join calls it."""
        not_served.refuse("torch.distributed.algorithms.join.Join([DistributedDataParallel])")
