"""The engine of a DistributedDataParallel: made of its options, and anew when its module has
changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from apex import _core
from apex._group_names import name_of
from apex.parallel import _buffers, _included, _options
from apex.parallel._groups import end_groups_at_exit, require_group
from apex.parallel._join import Join
from apex.parallel._mixed_precision import MixedPrecision
from apex.parallel._steps import watch_optimizers
from apex.parallel._watched_module import WatchedModule, tensors_of_functional_call


class EngineOwner(nn.Module):
    """What all parts of the wrapper share. Its attributes are set by DistributedDataParallel."""

    module: nn.Module
    message_size: int
    bucket_cap_mb: float | None
    delay_allreduce: bool
    num_allreduce_streams: int
    allreduce_always_fp32: bool
    retain_allreduce_buffers: bool
    gradient_as_bucket_view: bool
    gradient_average: bool
    gradient_predivide_factor: float
    broadcast_buffers: bool
    static_graph: bool
    check_finite: bool
    check_reduction: bool | None
    registered_buffers: bool
    parameters_to_ignore: set[str]
    process_group: dist.ProcessGroup
    world_size: float
    _trigger_names: list[str]
    _mixed_precision: MixedPrecision | None
    _join: Join | None  # the one in force
    _reducer: _core.Reducer | None
    _groups: list[dist.ProcessGroup]
    _splits_graphs: bool
    _parameters_seen: list[nn.Parameter]  # as _reducer numbers them
    _buffers_agreed: _buffers.Buffers  # at the same time
    _first_bucket_bytes: int = _options.FIRST_BUCKET_BYTES  # where buckets are sized in bytes
    _engines_made: int = 0  # tells one engine from the next; a reference would keep its hooks alive
    _overlap: Any  # the OverlappedOptimizer, if there is one
    _watched: WatchedModule | None  # None: the next forward builds the engine again
    _copied: WatchedModule | None = None  # what was unpickled or copied, until it has an engine

    # --- construction, also after unpickling and when the module has changed ---

    def _connect(
        self, process_group: dist.ProcessGroup | None, given: Any, init_sync: bool
    ) -> _core.Reducer:
        self.process_group = require_group(process_group, type(self).__name__)
        end_groups_at_exit(self)
        watch_optimizers()
        self.world_size = float(dist.get_world_size(self.process_group))
        # With one rank, or if all gradients come or go at the end of backward, nothing can overlap.
        self._splits_graphs = (
            self.world_size > 1 and not self.delay_allreduce and self._mixed_precision is None
        )
        if not _options.over_gloo(self.process_group):
            # Making groups is collective: ranks that want different numbers are told before.
            _options.check_initialized(self.module)
            named = dict(_included.named_parameters(self.module, self.parameters_to_ignore))
            _core.verify_same_model(
                list(named), list(named.values()), self._settings(), name_of(self.process_group)
            )
        self._groups = _options.communicators(self.num_allreduce_streams, given, self.process_group)
        reducer = self._build_reducer(init_sync)
        if init_sync and self.broadcast_buffers:
            self._sync_buffers()
        return reducer

    def _build_reducer(self, init_sync: bool) -> _core.Reducer:
        # If the models are refused, the next forward compares them again on every rank: one that
        # has taken its change back must not go on with the old engine while others build.
        self._watched = None
        watched = WatchedModule(self)
        names = [name for name, _ in self._named_parameters()]
        parameters = watched.parameters
        _options.check_initialized(self.module)
        if self._reducer is not None:
            self._reducer.wait()  # what it still has on its way would be lost with it
        in_bytes = self.bucket_cap_mb is not None
        if self.bucket_cap_mb is None:
            cap = _options.given_elements(self.message_size) or 0
        else:
            cap = max(1, int(self.bucket_cap_mb * (1 << 20)))
        synchronizing = self._reducer is None or self._reducer.synchronizing
        reducer = _core.Reducer(
            names,
            parameters,
            [name_of(group) for group in self._groups],
            cap=cap,
            first_cap=min(cap, self._first_bucket_bytes) if in_bytes else 0,
            cap_in_bytes=in_bytes,
            delay_allreduce=self.delay_allreduce,
            # Those that are there: a frozen one gets no gradient, so it closes no bucket.
            trigger_parameters=[i for i, name in enumerate(names) if name in self._trigger_names],
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            allreduce_always_fp32=self.allreduce_always_fp32,
            gradient_average=self.gradient_average,
            gradient_predivide_factor=self.gradient_predivide_factor,
            static_graph=self.static_graph,
            init_sync=init_sync,
            check_finite=self.check_finite,
            check_steps=self.check_reduction,
            registered_buffers=self.registered_buffers,
            settings=self._settings(),
        )
        reducer.synchronizing = synchronizing
        self._reducer, self._parameters_seen = reducer, parameters
        self._buffers_agreed = _buffers.Buffers(self.module, self.parameters_to_ignore)
        self._engines_made += 1
        self._install_hooks(reducer)
        self._watched = watched
        return reducer

    def _module_changed(self) -> bool:
        """Whether the module needs another engine; every rank has to see the same change."""
        if self._mixed_precision is not None and self._mixed_precision.in_place:
            return False  # see Note [Casts in backward]
        return self._watched is None or self._watched.has_other_parameters(self)

    def _settings(self) -> list[str]:
        """What has to be the same on all ranks, besides what the engine knows of; as ranks may be
        written in C++, which has none of these options, only what is not left at its default."""
        mixed = self._mixed_precision
        options = {
            "broadcast_buffers": (self.broadcast_buffers, False),
            "num_allreduce_streams": (self.num_allreduce_streams, 1),
            "registered_buffers": (self.registered_buffers, False),
            "mixed_precision": (None if mixed is None else mixed.describe(), None),
        }
        settings = [f"{name}={v}" for name, (v, default) in options.items() if v != default]
        if self.broadcast_buffers:
            settings += _buffers.described(self.module, self.parameters_to_ignore)
        return settings

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are synchronized."""
        return _included.named_parameters(self.module, self.parameters_to_ignore)

    def _install_hooks(self, engine: _core.Reducer) -> None:
        """Gives a new engine what was registered with the one before it."""

    def _sync_buffers(self, root: int = 0) -> None:
        try:
            self._buffers_agreed.take(self.process_group, root, tensors_of_functional_call())
        except _buffers.BuffersDiffer:
            if self._reducer is not None:
                self._reducer.release()  # see Note [Buffers that change]
            raise

    def _connect_copy(self) -> _core.Reducer:
        """After unpickling or copying: ranks have the same, but for what was replaced since then,
        of which rank 0's counts as in any module."""
        replaced = self._copied is not None and self._copied.has_other_parameters(self)
        reducer = self._connect(None, None, init_sync=replaced)
        self._copied = None
        return reducer

    def _refuse_backward(self, outputs: list[Tensor]) -> None:
        """A copy that was run in ``eval()`` is not connected: nobody would average gradients."""

        def refuse(grad: Tensor) -> None:
            raise RuntimeError(
                "backward through a copy of DistributedDataParallel that is not connected to the "
                "other ranks: its first forward ran in eval(). Run one in train(), or call "
                "relearn(), on every rank before that forward."
            )

        for output in outputs:
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(refuse)

    @property
    def _engine(self) -> _core.Reducer:
        return self._connect_copy() if self._reducer is None else self._reducer

    # --- accumulation ---

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward does not communicate: gradients accumulate in this process.

        What accumulated is part of the next synchronized backward. It is the backward that counts,
        not the forward. May be nested, and may be left by an exception. Every process has to do the
        same.
        """
        before = self._engine.synchronizing
        self._engine.synchronizing = False
        try:
            yield
        finally:
            self._engine.synchronizing = before

    def disable_allreduce(self) -> None:
        """From now on, backward does not communicate; see :meth:`no_sync`."""
        self._engine.synchronizing = False

    def enable_allreduce(self) -> None:
        """From now on, backward communicates; the next one takes along what has accumulated."""
        self._engine.synchronizing = True

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that begins now communicates."""
        return self._engine.synchronizing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on: bool) -> None:
        self._engine.synchronizing = bool(on)

    # --- pickling: the reducer and the groups belong to the process ---

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_reducer", "_watched", "_parameters_seen", "_buffers_agreed"):
            state.pop(name, None)
        for name in ("_groups", "process_group", "device_mesh"):
            state.pop(name, None)
        for name in ("_bucket_callback", "_join", "_torch_join", "_overlap", "_copied"):
            state[name] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        base: Any = super()
        base.__setstate__(state)
        # The first forward in train() connects to the default group; evaluation needs none.
        self._reducer = self._watched = None
        self._copied = WatchedModule(self)
