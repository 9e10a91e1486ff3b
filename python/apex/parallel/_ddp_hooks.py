"""What a script hangs into the reduction of a DistributedDataParallel: communication hooks,
callbacks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from apex import _core
from apex.parallel import _comm_hook
from apex.parallel._ddp_engine import EngineOwner


class ReducedBucket(NamedTuple):
    """What a bucket callback is called with."""

    index: int
    parameters: list[nn.Parameter]


class BucketHooks(EngineOwner):
    """The part of the wrapper that registers them."""

    _comm_hook: _comm_hook.RegisteredHook | str | None
    _bucket_callback: Callable[[ReducedBucket], None] | None

    def _install_hooks(self, engine: _core.Reducer) -> None:
        if self._comm_hook is not None:
            self._install_comm_hook(engine, self._comm_hook)
        if self._bucket_callback is not None or self._overlap is not None:
            self._install_bucket_callback(engine)
        if self._overlap is not None:
            engine.set_deferred(True)

    # --- communication hooks ---

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, Any], torch.futures.Future]
    ) -> None:
        """Replaces the all-reduce of each bucket, and the averaging, by ``hook(state, bucket)``.

        ``bucket`` has the methods of ``torch.distributed.GradBucket``, so the hooks of
        ``torch.distributed.algorithms.ddp_comm_hooks`` can be used. The hook returns a
        ``torch.futures.Future`` that yields the final gradients, a tensor like ``bucket.buffer()``.
        It is called in launch order, on an autograd thread. May be registered once, on every
        process.

        Raises:
            TypeError: if ``hook`` is not callable.
            RuntimeError: if there is a hook already.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook is a function, got {type(hook).__name__}.")
        self._set_comm_hook(_comm_hook.RegisteredHook(state, hook))

    def register_builtin_comm_hook(self, name: str) -> None:
        """Sends gradients in a narrower dtype, without Python on the way.

        Args:
            name: ``"fp16"`` or ``"bf16"``: an all-reduce in that dtype. ``"fp16_fp32_sum"`` or
                ``"bf16_fp32_sum"``: that dtype on the wire, sums in float32 (a reduce-scatter by
                all-to-all, then an all-gather), so that the rounding does not grow with the number
                of processes.

        Register one hook at most, the same on every process. Gradients in ``.grad`` keep their
        dtype.

        Raises:
            ValueError: for another name.
            RuntimeError: if there is a hook already.
        """
        self._set_comm_hook(name)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """As torch's: FP16_COMPRESS is ``"fp16"``; ALLREDUCE is what happens without a hook."""
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS:
            self.register_builtin_comm_hook("fp16")

    def _set_comm_hook(self, comm_hook: _comm_hook.RegisteredHook | str) -> None:
        mine = None if self._mixed_precision is None else self._mixed_precision.wire
        if self._comm_hook is not None and self._comm_hook != mine:
            raise RuntimeError("a communication hook is registered already; there can be one.")
        engine = self._engine
        self._install_comm_hook(engine, comm_hook)
        self._comm_hook = comm_hook  # where the engine finds it

    def _install_comm_hook(
        self, engine: _core.Reducer, comm_hook: _comm_hook.RegisteredHook | str
    ) -> None:
        if isinstance(comm_hook, str):
            engine.set_builtin_comm_hook(comm_hook)
        else:
            engine.set_comm_hook(_comm_hook.make_runner(weakref.ref(self)))

    def register_bucket_callback(self, callback: Callable[[ReducedBucket], None] | None) -> None:
        """Calls ``callback(bucket)`` for each bucket of a synchronized backward that is complete.

        ``bucket.parameters`` are those whose averaged ``.grad`` is final, ``bucket.index`` is its
        place in the launch order (-1: apart from the plan). Later buckets may still be on their
        way, so an optimizer that steps these parameters now does so while they are communicated.
        Each parameter that got a gradient is in one bucket; buckets with parameters that this
        process did not use come last. Gradients that accumulate under :meth:`no_sync` are not
        reported before they are reduced.

        Called on the thread that ends backward, with gradients disabled or not as backward has it.
        An exception reaches the caller of ``backward()`` once all buckets are complete. The
        callback must not start a backward. ``None`` takes it away.
        """
        self._bucket_callback = callback
        self._install_bucket_callback(self._engine)

    def _install_bucket_callback(self, engine: _core.Reducer) -> None:
        if self._bucket_callback is None and self._overlap is None:
            engine.set_bucket_callback(None)
            return
        reference = weakref.ref(self)  # see Note [What the engine may hold]

        def run(index: int, members: list[int]) -> None:
            wrapper = _comm_hook.require_wrapper(reference, "a bucket callback")
            parameters = wrapper._parameters_seen
            bucket = ReducedBucket(index, [parameters[i] for i in members])
            if wrapper._bucket_callback is not None:
                wrapper._bucket_callback(bucket)
            if wrapper._overlap is not None:
                wrapper._overlap._bucket_arrived(bucket)

        engine.set_bucket_callback(run)
