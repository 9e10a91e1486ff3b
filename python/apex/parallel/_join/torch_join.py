# SPDX-License-Identifier: BSD-3-Clause
"""Uneven inputs: the wrapper in ``torch.distributed.algorithms.join.Join``, for example together
with a ZeroRedundancyOptimizer.

Note [Iterations of torch's Join]

Torch's Join counts iterations. A rank with data notifies the others at its first collective of each
iteration, and a rank without data then runs the main_hook() of every object once. Our join()
announces each forward and backward until all ranks have ended. Here, the two are combined. A
synchronized forward begins an iteration of torch's Join. In its main_hook(), a rank without data
follows our announcements up to the backward, and then the other objects run their hooks. So an
iteration has one forward and one backward. Forwards and backwards in no_sync() belong to no
iteration and are not announced.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms import join as torch_join

from apex._core import JoinEventKind as Kind
from apex._internal import joining
from apex.parallel._join.join import Join


class TorchJoinHook(torch_join.JoinHook):
    """A hook that only torch's Join references, so that the wrapper can be freed after a Join that
    an exception has ended."""

    def __init__(self, state: TorchJoin) -> None:
        super().__init__()
        self._state = state
        weakref.finalize(self, state.end).atexit = False

    def main_hook(self) -> None:
        """Take part in one iteration of the ranks with data."""
        self._state.follow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the state of a rank that trained to the end, and end the wrapper's part in the
        join."""
        self._state.finish(not is_last_joiner)


class TorchJoin(Join):
    """A wrapper's part in one Join of torch."""

    def __init__(self, wrapper: Any, divide_by_initial_world_size: bool) -> None:
        super().__init__(wrapper._engine, divide_by_initial_world_size, False, [])
        self._wrapper = wrapper
        self.config: Any = None  # torch's _JoinConfig
        self._announces = False
        # Synchronized backwards before the last announced forward; None: no forward was announced.
        self._backwards: int | None = None

    def begin(self, config: Any) -> None:
        """Called when torch's Join is constructed.

        Raises:
            ValueError: if the wrapper is not the first of its objects.
            RuntimeError: inside another join.
        """
        engine = self._engine
        if not config.enable:
            return
        if not config.is_first_joinable:
            raise ValueError(
                "Join([...]) takes only one DistributedDataParallel, as its first element, because "
                "the wrapper's forward begins an iteration: wrap modules that are trained together "
                "in one DistributedDataParallel, and list optimizers after it."
            )
        if isinstance(engine.join, TorchJoin):
            engine.join.end()  # an exception ended that Join, and its object still exists
        elif engine.join is not None:
            raise RuntimeError(
                "torch's Join was entered inside DistributedDataParallel.join(): "
                "use only one of them."
            )
        self.config = config
        engine.join = self

    def end(self) -> None:
        if self._engine.join is self:
            self._end()

    # --- while this rank has data ---

    def announce_forward(self, synchronizes_buffers: bool) -> int:
        reducer = self._reducer
        joining.set_current(self)
        self._announces = reducer.synchronizing
        if not self._announces:
            if self._wrapper.check_reduction:
                raise RuntimeError(
                    "no_sync() with check_reduction=True is not supported under torch's Join: "
                    "ranks without data do not receive these forwards, so the check would report "
                    "them as skipped. Use DistributedDataParallel.join()."
                )
            reducer.end_join()
            return 0
        backwards = reducer.statistics()["backwards"]
        if self._backwards is not None and backwards != self._backwards + 1:
            raise RuntimeError(
                f"rank {self._group.rank()}: {backwards - self._backwards} synchronized backwards "
                "ran after the last forward, but torch's Join expects exactly one after each "
                "forward with gradients outside no_sync(). Use DistributedDataParallel.join(), "
                "which takes any number."
            )
        self._backwards = None
        work = torch_join.Join.notify_join_context(self._wrapper)
        if work is not None:
            work.wait()
        self._backwards = backwards
        reducer.begin_join(self._divide_by_initial_world_size)
        return super().announce_forward(synchronizes_buffers)

    def announce_batch_norm(self, module: Any) -> None:
        if not self._announces:
            raise RuntimeError(
                "SyncBatchNorm in no_sync() is not supported under torch's Join: ranks without "
                "data take part only in synchronized forwards. Use DistributedDataParallel.join()."
            )
        super().announce_batch_norm(module)

    def announce_overflow_flags(self, scaler: Any, group: dist.ProcessGroup | None) -> None:
        raise RuntimeError(
            "amp's dynamic loss scale is not supported under torch's Join: ranks without data do "
            "not take part when its overflow flags are combined. Use "
            "DistributedDataParallel.join(), or amp.initialize(overflow_group=False)."
        )

    # --- after this rank has run out of data ---

    def follow_iteration(self) -> None:
        reducer = self._reducer
        reducer.begin_join(self._divide_by_initial_world_size)
        kind = Kind.FORWARD
        while kind in (Kind.FORWARD, Kind.CUSTOM):
            event = reducer.await_event()
            kind = event.kind
            self._follow(event)

    def finish(self, followed: bool) -> None:
        try:
            self._take_final_state(followed)
        finally:
            self.end()
