# SPDX-License-Identifier: BSD-3-Clause
"""Uneven inputs: the implementation of ``DistributedDataParallel.join()``.

A rank that has run out of batches takes part in the others' collectives, with zeros. Ranks with
data announce each forward and backward to it by a small all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch

from apex import _core
from apex._core import JoinEvent
from apex._core import JoinEventKind as Kind
from apex._internal import joining
from apex._internal.group_names import name_of
from apex.parallel._engine import Engine
from apex.parallel.syncbn_group import default_group_name


class Join:
    """The context manager of one ``with ddp.join():``. Can be used once."""

    def __init__(
        self,
        engine: Engine,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
    ) -> None:
        engine.connected()
        self._engine = engine
        self._divide_by_initial_world_size = divide_by_initial_world_size
        self._throws = throw_on_early_termination

    def __enter__(self) -> Join:
        if joining.current() is not None or self._engine.join is not None:
            raise RuntimeError(
                "join() was entered inside another join(): wrap modules that are trained together "
                "in one DistributedDataParallel, or train them in separate loops."
            )
        self._reducer.begin_join(self._divide_by_initial_world_size)
        self._engine.join = self
        joining.set_current(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._shadow_others()
        finally:
            self._end()

    def _end(self) -> None:
        self._reducer.end_join()
        self._engine.join = None
        joining.set_current(None)

    @property
    def _reducer(self) -> _core.Reducer:
        return self._engine.connected()

    @property
    def _group(self) -> Any:
        return self._engine.process_group

    # --- while this rank has data ---

    def announce_forward(self, synchronizes_buffers: bool) -> int:
        """Announce a forward; returns the rank whose buffers are used."""
        event = self._reducer.announce(Kind.FORWARD, int(synchronizes_buffers))
        self._check(event.active)
        return event.active[0]

    def announce_batch_norm(self, module: Any) -> None:
        if module.process_group is not None:
            raise RuntimeError(
                "a SyncBatchNorm with its own process_group is not supported under join(), because "
                "ranks without data take part only in layers of the default process group: "
                "construct it without process_group."
            )
        self._reducer.announce(Kind.CUSTOM, 4 * module.num_features)

    def _check(self, active: list[int]) -> None:
        if self._throws and len(active) < self._engine.world_size:
            ended = sorted(set(range(self._engine.world_size)) - set(active))
            raise RuntimeError(
                f"rank {self._group.rank()}: ranks {ended} have run out of data, and join() was "
                "called with throw_on_early_termination=True. (Detected at least one rank that "
                "exhausted inputs.)"
            )

    # --- after this rank has run out of data ---

    def _shadow_others(self) -> None:
        shadowed = False
        while True:
            event = self._reducer.await_event()
            if event.kind == Kind.END:
                break
            shadowed = True
            self._follow(event)
        self._take_final_state(shadowed)

    def _follow(self, event: JoinEvent) -> None:
        self._check(event.active)
        kind, argument = event.kind, event.argument
        if kind == Kind.FORWARD:
            self._shadow_forward(bool(argument), event.active[0])
        elif kind == Kind.CUSTOM:
            _shadow_batch_norm(argument // 4, argument % 4, self._engine.device)
        elif kind == Kind.BACKWARD:
            self._reducer.shadow_backward_begin(event)
            while event.end_follows:
                within = self._reducer.await_event()
                if within.kind == Kind.BACKWARD_END:
                    break
                self._follow(within)
            self._reducer.shadow_backward_end()

    def _shadow_forward(self, synchronizes_buffers: bool, root: int) -> None:
        self._reducer.prepare_for_forward()
        if synchronizes_buffers:
            self._engine.sync_buffers(root)

    def _take_final_state(self, shadowed: bool) -> None:
        """Copy parameters and buffers of a rank that trained to the end to the ranks that did
        not."""
        group = self._group
        root = self._reducer.last_with_data(shadowed)
        if root < 0:
            return
        device = self._engine.device
        named = self._engine.named_tensors()
        tensors = [tensor.detach() for _, tensor in named if tensor.layout == torch.strided]
        what = "broadcast of parameters and buffers at the end of join()"
        _core.broadcast_coalesced(tensors, name_of(group), root, what)
        # No rank may continue, and possibly exit, before all have received the data.
        nothing = [torch.zeros(1, device=device)]
        _core.all_reduce_coalesced(nothing, name_of(group), 1.0, "end of join()")


def _shadow_batch_norm(length: int, kind: int, device: torch.device) -> None:
    """Take part in one exchange of a SyncBatchNorm with an empty batch on `device`, which adds
    nothing. `kind` is the code that C++'s Reducer announces."""
    ops, group = torch.ops.apex, default_group_name()
    if kind >= 2:
        dtype = torch.float32 if kind == 2 else torch.float64
        ops.all_reduce_sum(torch.zeros(length, dtype=dtype, device=device), group)
        return
    empty = torch.empty(0, length, device=device)
    if kind == 0:
        nothing = (None,) * 5
        ops.sync_batch_norm(empty, *nothing, 0.1, 1e-5, group)
        return
    statistics = torch.ones(length, dtype=torch.float64, device=device)
    count = torch.ones(1, dtype=torch.int64, device=device)
    ops.sync_batch_norm_backward(
        empty, empty, None, statistics, statistics, count, [True, False, False], group
    )
