# SPDX-License-Identifier: BSD-3-Clause
"""The engine of a DistributedDataParallel: its reducer, which is created again when the module has
changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import _core
from apex._internal import joining, not_served, skipped_steps
from apex._internal.group_names import name_of
from apex._internal.groups import (
    backend_name,
    end_groups_at_exit,
    group_of_all_ranks,
    require_group,
    world_group,
)
from apex._internal.optimizer_steps import watch_optimizers
from apex._internal.untraced import in_transform, outside_traces
from apex.parallel import _buffers, _comm_hook, _options
from apex.parallel._replicas import watch_loads
from apex.parallel._watched_module import WatchedModule, check_initialized, included_parameters


def over_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on ``device`` go over Gloo, or over the backend ``apex``, which uses Gloo."""
    return backend_name(group, device) in ("gloo", "apex")


def communicators(
    count: int, given: Any, group: dist.ProcessGroup, device: torch.device
) -> list[dist.ProcessGroup]:
    """The groups that buckets on ``device`` use in turn: the script's, or new ones.

    Over Gloo, the engine creates connections from the group itself. Only its members take part.
    """
    if given is not None:
        return list(given[0])
    if count == 1 or over_gloo(group, device):
        return [group] * count
    if group is not world_group():
        not_served.refuse(not_served.COMMUNICATORS, ValueError)
    return [group, *(group_of_all_ranks("apex_allreduce") for _ in range(count - 1))]


class Engine:
    """A wrapper's reducer, its process groups, and the module that it was created for.

    It belongs to the process. Its reference to the wrapper is weak, so that both can be freed.
    """

    reducer: _core.Reducer | None = None  # None: the next forward with gradients connects
    process_group: dist.ProcessGroup | None = None
    groups: Sequence[dist.ProcessGroup] = ()
    parameters: Sequence[nn.Parameter] = ()  # in the reducer's order
    comm_hook: _comm_hook.RegisteredHook | str | None = None
    splits_graphs = False  # see Note [Compiled graphs are split by bucket] in _compile.py
    made = 0  # numbers the reducers; a reference to a reducer would keep its hooks alive
    _buffers_agreed: _buffers.Buffers | None = None  # from when the reducer was created
    _watched: WatchedModule | None = None  # None: the next forward creates a new reducer

    def __init__(
        self, wrapper: nn.Module, options: _options.EngineOptions, broadcast_buffers: bool
    ) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.options = options
        self.broadcast_buffers = broadcast_buffers

    # --- construction, also of a copy's reducer and when the module has changed ---

    def connect(
        self, process_group: dist.ProcessGroup | None = None, given: Any = None
    ) -> _core.Reducer:
        """Create the groups (or use the script's, `given`) and the first reducer. Collective."""
        options = self.options
        self.process_group = group = require_group(process_group, type(self._wrapper()).__name__)
        end_groups_at_exit(self)
        watch_optimizers(self)
        if options.reducer["skip_failed_steps"]:
            skipped_steps.engines.add(self)
        several = dist.get_world_size(group) > 1
        self.splits_graphs = several and not options.reducer["delay_allreduce"]
        if not over_gloo(group, self.device):
            # Creating groups is collective, so ranks with different counts must raise before that.
            check_initialized(self.module)
            named = dict(self.named_parameters())
            _core.verify_same_model(
                list(named), list(named.values()), self._settings(), name_of(group)
            )
        self.groups = communicators(options.communicators, given, group, self.device)
        init_sync = options.reducer["begins_alike"]
        reducer = self.make_reducer(init_sync)
        if init_sync and self.broadcast_buffers:
            self.sync_buffers()
        watch_loads(self)
        return reducer

    def make_reducer(self, init_sync: bool) -> _core.Reducer:
        """Create a reducer for the current module. Collective."""
        # If the models are refused, the next forward compares them again on every rank. Otherwise a
        # rank that has undone its change would use the old reducer while others create a new one.
        self._watched = None
        watched = WatchedModule(self._wrapper, self.options.ignored)
        names = [name for name, _ in self.named_parameters()]
        check_initialized(self.module)
        options = _core.ReducerOptions()
        for name, value in self.options.reducer.items():
            setattr(options, name, value)
        # Only trainable parameters: a frozen parameter gets no gradient, so it closes no bucket.
        triggers = self.options.trigger_names
        options.trigger_parameters = [i for i, name in enumerate(names) if name in triggers]
        options.init_sync = init_sync
        options.settings = self._settings()
        options.steps_reported = True  # by torch's optimizer hooks
        groups = [name_of(group) for group in self.groups]
        reducer = _core.Reducer(names, watched.parameters, groups, options)
        if self.broadcast_buffers:
            _buffers.check(self.module, self.groups[0], self.options.ignored)
        if self.reducer is not None:
            reducer.synchronizing = self.reducer.synchronizing
            reducer.take_weight(self.reducer)
        self.reducer, self.parameters = reducer, watched.parameters
        self._buffers_agreed = _buffers.Buffers(self.module, self.options.ignored)
        self.made += 1
        if self.comm_hook is not None:
            _comm_hook.install(reducer, self.comm_hook, self)
        self._watched = watched
        return reducer

    def connected(self) -> _core.Reducer:
        """The reducer. A copy creates its reducer here."""
        return self.connect() if self.reducer is None else self.reducer

    def set_comm_hook(self, comm_hook: _comm_hook.RegisteredHook | str) -> None:
        """Set the hook: a script's, or the name of a built-in one."""
        if self.comm_hook is not None:
            raise RuntimeError(
                "a communication hook is already registered, and a wrapper can have only one."
            )
        _comm_hook.install(self.connected(), comm_hook, self)
        self.comm_hook = comm_hook

    def set_static_graph(self) -> None:
        """Set the option ``static_graph``. Collective."""
        self.options = self.options._replace(reducer={**self.options.reducer, "static_graph": True})
        self.make_reducer(init_sync=False)

    def _settings(self) -> list[str]:
        if not self.broadcast_buffers:
            return self.options.settings
        described = _buffers.described(self.module, self.options.ignored)
        return ["broadcast_buffers=True", *self.options.settings, *described]

    # --- the module ---

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapper: Any = self._wrapper()
        module: nn.Module = wrapper.module
        return module

    @property
    def device(self) -> torch.device:
        """The module's device, for any group. It must be the same on all ranks."""
        devices = (tensor.device for _, tensor in self.named_tensors() if not tensor.is_meta)
        return next(devices, torch.device("cpu"))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The synchronized parameters."""
        return included_parameters(self.module, self.options.ignored)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The synchronized parameters and buffers."""
        yield from self.named_parameters()
        for name, buffer in self.module.named_buffers():
            if name not in self.options.ignored:
                yield name, buffer

    def module_changed(self) -> bool:
        """Whether the module needs a new reducer. Every rank must observe the same change."""
        return self._watched is None or self._watched.has_other_parameters()

    def sync_buffers(self) -> None:
        """Broadcast the buffers of rank 0. Collective."""
        assert self._buffers_agreed is not None and self.process_group is not None
        self._buffers_agreed.take(self.process_group, 0)

    # --- forward ---

    def prepare(self, wrapper: Any) -> None:
        """Prepare a forward with gradients enabled. Collective if parameters were added, removed or
        replaced, or buffers are broadcast."""
        reducer = self.reducer
        if reducer is None and not any(p.requires_grad for _, p in self.named_parameters()):
            return  # some ranks may evaluate a frozen copy alone
        if reducer is None or self.module_changed():
            if reducer is not None and joining.active():
                raise RuntimeError(
                    "parameters were added, removed or replaced under join(): make such changes "
                    "before join(), on every rank."
                )
            with outside_traces():
                reducer = self.make_reducer(init_sync=True) if reducer else self.connect()
        reducer.prepare_for_forward()
        copies = (
            self.broadcast_buffers
            and wrapper.training
            and wrapper.require_forward_param_sync
            and reducer.synchronizing
            and not joining.active()  # some ranks may run no forward
            and not in_transform()  # of torch.func, within which nothing is communicated
        )
        if copies:
            self.sync_buffers()
