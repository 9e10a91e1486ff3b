"""Uneven inputs, as a DistributedDataParallel offers them: join(), and what torch's Join asks
for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join as torch_join

from apex.parallel._ddp_engine import EngineOwner
from apex.parallel._join import Join, collective_device
from apex.parallel._torch_join import TorchJoin, TorchJoinHook


class UnevenInputs(EngineOwner):
    """The part of the wrapper that joins."""

    _torch_join: TorchJoin | None  # made last

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        scalers: Sequence[Any] = (),
    ) -> contextlib.AbstractContextManager[Any]:
        """``with ddp.join():`` around a training loop whose number of batches differs by process.

        A process that leaves the block early takes part in what the others still do: forwards that
        take over buffers, backwards, with zeros for its gradients, and SyncBatchNorm, with an empty
        batch. When all have left, every process has the parameters, buffers and loss scalers of one
        that trained to the end; optimizer states are each process's own.

        Args:
            divide_by_initial_world_size: divide gradients by the number of processes; else by the
                number of those that still have data.
            enable: False makes it do nothing, for inputs that are known to be even.
            throw_on_early_termination: raise on every process as soon as one has run out.
            scalers: loss scalers (``state_dict``, ``load_state_dict``) to take over at the end;
                those of ``apex.amp`` are.

        Each forward and each backward is announced to the others in a small all-reduce that the
        host waits for. All processes with data have to run the same forwards and backwards in each
        step. The module must have no collectives of its own but SyncBatchNorm's over all processes,
        outside checkpointed segments.

        Raises:
            RuntimeError: in nested use; as said above; or if processes with data do different
                things.
        """
        if not enable:
            return contextlib.nullcontext()
        return Join(self, divide_by_initial_world_size, throw_on_early_termination, scalers)

    def join_hook(self, **kwargs: Any) -> torch_join.JoinHook:
        """For ``torch.distributed.algorithms.join.Join([ddp, optimizer])``, which calls it.

        Give the wrapper first. ``divide_by_initial_world_size`` is understood, as in :meth:`join`.
        Each synchronized forward is followed by one backward; for more freedom, and for scalers,
        there is :meth:`join`.
        """
        self._torch_join = TorchJoin(self, kwargs.get("divide_by_initial_world_size", True))
        return TorchJoinHook(self._torch_join)

    # Read and written by torch's Join.
    @property
    def _join_config(self) -> Any:
        if self._torch_join is None:
            return torch_join._JoinConfig.construct_disabled_join_config()
        return self._torch_join.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if self._torch_join is not None:  # join_hook() has been called
            self._torch_join.begin(config)

    @property
    def join_device(self) -> torch.device:
        """Where torch's Join puts what it communicates."""
        return collective_device(self.process_group)

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The processes that torch's Join counts."""
        return self.process_group


# Known to torch as what its Join takes, without the cost of an abstract base class.
torch_join.Joinable.register(UnevenInputs)
