# SPDX-License-Identifier: BSD-3-Clause
"""Names of Apex's and torch's DistributedDataParallel that scripts and libraries read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from apex._internal import not_served
from apex.parallel import _compile, _options
from apex.parallel._engine import Engine


def refuse_overrides(kind: type) -> None:
    """Raise NotImplementedError for a subclass with a method that only Apex's wrapper calls."""
    for name in not_served.METHODS_OF_APEX:
        if hasattr(kind, name):
            not_served.refuse(f"a subclass of DistributedDataParallel with {name}()")


class Names:
    """Base class of the wrapper."""

    _engine: Engine
    module: nn.Module
    message_size: int
    bucket_cap_mb: float | None
    static_graph: bool
    retain_allreduce_buffers: bool

    @property
    def allreduce_buffers(self) -> list[torch.Tensor]:
        """With ``retain_allreduce_buffers``: the flat buffers, ``[elements]`` each, in launch
        order, of which gradients are views. Empty before the first backward, and after a failure.
        """
        return self._engine.connected().buffers() if self.retain_allreduce_buffers else []

    @property
    def needs_refresh(self) -> bool:
        """Whether the next backward records the order of gradients."""
        return self._engine.connected().plan() is None

    @property
    def active_params(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        return [p for _, p in self._engine.named_parameters() if p.requires_grad]

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that starts now communicates."""
        return self._engine.connected().synchronizing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on: bool) -> None:
        self._engine.connected().synchronizing = bool(on)

    @property
    def bucket_bytes_cap(self) -> int:
        """The bucket size in bytes by which torch.compile splits the module's graph."""
        return _compile.bucket_bytes(
            self.module.parameters(), self.message_size, self.bucket_cap_mb
        )

    def _set_static_graph(self) -> None:
        """Same as ``static_graph=True``. Call it before the first backward, on every process."""
        if not self.static_graph:
            self.static_graph = True
            self._engine.set_static_graph()

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """As in torch: FP16_COMPRESS is ``"fp16"``. ALLREDUCE is the default without a hook."""
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS:
            self._engine.set_comm_hook("fp16")

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
        names = list(params_and_buffers_to_ignore)
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"the module has no parameter or buffer {unknown[0]!r} to ignore.")
        setattr(module, _options.IGNORED, names)

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
