# SPDX-License-Identifier: BSD-3-Clause
"""The engine of a DistributedDataParallel: its reducer, which is created again when the module has
changed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import _core
from apex._internal import joining, skipped_steps
from apex._internal.group_names import name_of
from apex._internal.groups import (
    backend_name,
    backends_of,
    end_groups_at_exit,
    group_like,
    require_group,
)
from apex._internal.optimizer_steps import watch_optimizers
from apex._internal.untraced import in_transform
from apex.parallel import _buffers, _options
from apex.parallel._comm_hook import Hooks
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
    if not backends_of(group):
        raise ValueError(
            "num_allreduce_streams > 1 needs more process groups, which cannot be created for a "
            "process_group whose class is written in Python: pass them as allreduce_communicators."
        )
    return [group, *(group_like(group) for _ in range(count - 1))]


class Engine:
    """A wrapper's reducer, its process groups, and the module that it was created for.

    It belongs to the process. A copy keeps the options and creates the rest in its first forward in
    ``train()``. It references its wrapper weakly, so dropping the wrapper frees both.
    """

    reducer: _core.Reducer | None = None
    process_group: dist.ProcessGroup | None = None
    groups: Sequence[dist.ProcessGroup] = ()
    parameters: Sequence[nn.Parameter] = ()  # in the reducer's order
    world_size = 0
    splits_graphs = False  # see Note [Compiled graphs are split by bucket] in _compile.py
    made = 0  # numbers the reducers; a reference to a reducer would keep its hooks alive
    _buffers_agreed: _buffers.Buffers | None = None  # from when the reducer was created
    _watched: WatchedModule | None = None  # None: the next forward creates a new reducer
    # the state of an unpickled or copied engine until it has a reducer
    _copied: WatchedModule | None = None

    def __init__(
        self, wrapper: nn.Module, options: _options.EngineOptions, broadcast_buffers: bool
    ) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._options = options
        self.hooks = Hooks()
        self.broadcast_buffers = broadcast_buffers

    # --- construction, also after unpickling and when the module has changed ---

    def connect(
        self, process_group: dist.ProcessGroup | None, given: Any, init_sync: bool
    ) -> _core.Reducer:
        """Create the groups (or use the script's, `given`) and the first reducer. Collective."""
        options, who = self._options, type(self._wrapper()).__name__
        self.process_group = group = require_group(process_group, who)
        end_groups_at_exit(self)
        watch_optimizers(self)
        if options.reducer["skip_failed_steps"]:
            skipped_steps.engines.add(self)
        self.world_size = dist.get_world_size(group)
        self.splits_graphs = self.world_size > 1 and not options.reducer["delay_allreduce"]
        if not over_gloo(group, self.device):
            # Creating groups is collective, so ranks with different counts must raise before that.
            check_initialized(self.module)
            named = dict(self.named_parameters())
            _core.verify_same_model(
                list(named), list(named.values()), self._settings(), name_of(group)
            )
        self.groups = communicators(options.communicators, given, group, self.device)
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
        watched = self._watch()
        names = [name for name, _ in self.named_parameters()]
        check_initialized(self.module)
        options = _core.ReducerOptions()
        for name, value in self._options.reducer.items():
            setattr(options, name, value)
        # Only trainable parameters: a frozen parameter gets no gradient, so it closes no bucket.
        triggers = self._options.trigger_names
        options.trigger_parameters = [i for i, name in enumerate(names) if name in triggers]
        options.init_sync = init_sync
        options.settings = self._settings()
        options.steps_reported = True  # by torch's optimizer hooks
        groups = [name_of(group) for group in self.groups]
        reducer = _core.Reducer(names, watched.parameters, groups, options)
        reducer.synchronizing = self.reducer is None or self.reducer.synchronizing
        if self.broadcast_buffers:
            _buffers.check(self.module, self.groups[0], self._options.ignored)
        if self.reducer is not None:
            reducer.take_weight(self.reducer)
        self.reducer, self.parameters = reducer, watched.parameters
        self._buffers_agreed = _buffers.Buffers(self.module, self._options.ignored)
        self.made += 1
        self.hooks.install(reducer)
        self._watched = watched
        return reducer

    def connected(self) -> _core.Reducer:
        """The reducer. A copy creates its reducer here."""
        if self.reducer is not None:
            return self.reducer
        # The parameters are equal on all ranks, except those replaced since the copy was made. For
        # these, rank 0's values are broadcast, as for any module.
        replaced = self._copied is not None and self._copied.has_other_parameters()
        reducer = self.connect(None, None, init_sync=replaced)
        reducer.check_replicas_next()
        self._copied = None
        return reducer

    def steps_skipped(self) -> int:
        """The number of steps skipped by the current reducer."""
        return 0 if self.reducer is None else int(self.reducer.statistics()["steps_skipped"])

    def check_replicas_next(self) -> None:
        """Let the next backward compare all parameters of all ranks."""
        if self.reducer is not None:  # else a copy: its first backward compares all
            self.reducer.check_replicas_next()

    def set_static_graph(self) -> None:
        """Set the option ``static_graph``. Collective."""
        options = {**self._options.reducer, "static_graph": True}
        self._options = self._options._replace(reducer=options)
        self.make_reducer(init_sync=False)

    def _settings(self) -> list[str]:
        settings = self._options.settings
        if not self.broadcast_buffers:
            return settings
        described = _buffers.described(self.module, self._options.ignored)
        return ["broadcast_buffers=True", *settings, *described]

    # --- the module ---

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapper: Any = self._wrapper()
        module: nn.Module = wrapper.module
        return module

    @property
    def device(self) -> torch.device:
        """The device of the communicated tensors: the module's device, for any group.

        A group may have backends for several devices. All ranks must use the same device.
        """
        devices = (tensor.device for _, tensor in self.named_tensors() if not tensor.is_meta)
        return next(devices, torch.device("cpu"))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The synchronized parameters."""
        return included_parameters(self.module, self._options.ignored)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The synchronized parameters and buffers."""
        yield from self.named_parameters()
        yield from self.named_buffers()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The synchronized buffers."""
        for name, buffer in self.module.named_buffers():
            if name not in self._options.ignored:
                yield name, buffer

    def module_changed(self) -> bool:
        """Whether the module needs a new reducer. Every rank must observe the same change."""
        return self._watched is None or self._watched.has_other_parameters()

    def _watch(self) -> WatchedModule:
        return WatchedModule(self._wrapper, self._options.ignored)

    def sync_buffers(self) -> None:
        """Broadcast the buffers of rank 0. Collective."""
        assert self._buffers_agreed is not None and self.process_group is not None
        self._buffers_agreed.take(self.process_group, 0)

    # --- forward ---

    def prepare(self, wrapper: Any) -> None:
        """Prepare a forward with gradients enabled. Collective if parameters were added, removed or
        replaced, or buffers are broadcast."""
        reducer = self.reducer
        if reducer is None and not wrapper.training:
            return  # some ranks may evaluate alone; see refuse_backward()
        changed = reducer is None or self.module_changed()
        if in_transform():
            # Within a transform of torch.func nothing is communicated. Gradients that an outer
            # backward accumulates in the parameters are averaged.
            if reducer is None or changed:
                raise RuntimeError(
                    "this DistributedDataParallel has no engine yet for the parameters it has now, "
                    "and cannot create one inside a transform of torch.func: run one forward "
                    "outside the transform first, on every rank."
                )
            reducer.prepare_for_forward()
            return
        if reducer is None:
            reducer = self.connected()
        elif changed:
            if joining.active():
                raise RuntimeError(
                    "parameters were added, removed or replaced under join(): make such changes "
                    "before join(), on every rank."
                )
            reducer = self.make_reducer(init_sync=True)
        reducer.prepare_for_forward()
        copies = (
            self.broadcast_buffers
            and wrapper.training
            and wrapper.require_forward_param_sync
            and reducer.synchronizing
            and not joining.active()  # some ranks may run no forward
        )
        if copies:
            self.sync_buffers()

    # --- copies ---

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_options", "broadcast_buffers", "world_size", "splits_graphs", "made")
        state = {name: value for name, value in self.__dict__.items() if name in kept}
        return {**state, "hooks": copy.copy(self.hooks)}

    def belong_to(self, wrapper: nn.Module) -> None:
        """Connect a copied or unpickled engine to `wrapper`, the copy."""
        self._wrapper = weakref.ref(wrapper)
        self._copied = self._watch()


def refuse_backward(outputs: Sequence[Tensor]) -> None:
    """Make backward raise for a copy that ran in ``eval()``. It is not connected, so its gradients
    would not be averaged."""

    def refuse(grad: Tensor) -> None:
        raise RuntimeError(
            "backward through a copy of DistributedDataParallel that is not connected to the other "
            "ranks: its first forward ran in eval(). Run its first forward in train(), or call "
            "rebuild_buckets() before it, on every rank."
        )

    for output in outputs:
        if output.requires_grad and output.grad_fn is not None:
            output.register_hook(refuse)
