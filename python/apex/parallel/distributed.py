# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel, a module around the reducer of ``_engine.py``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apex import _core
from apex._internal.flat import flatten, unflatten
from apex._internal.group_names import name_of
from apex._internal.refused import DataParallelWrapper
from apex._internal.tree import find_tensors
from apex._internal.untraced import untraced
from apex.parallel import _compile, _devices, _names, _options
from apex.parallel._comm_hook import RegisteredHook
from apex.parallel._engine import Engine
from apex.parallel._join import Join
from apex.parallel._reducer import (
    Reducer,
    apply_flat_dist_call,
    extract_tensors,
    flat_dist_call,
    split_by_type,
    split_half_float_double,
)
from apex.parallel._weight import Weight
from apex.parallel.sync_batchnorm import name_layers

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]

_NO_RANGE = contextlib.nullcontext()


class DistributedDataParallel(_names.Names, nn.Module, DataParallelWrapper):
    r"""Averages the gradients of a module over the processes of a group, during backward.

    Each process holds the whole module and trains on its own part of the batch. The constructor
    checks that all processes hold the same model and broadcasts rank 0's parameters, including
    frozen ones. Buckets of gradients are all-reduced while backward runs. When ``backward()``
    returns, every ``.grad`` has the parameter's shape and dtype and holds the average over all
    processes. It is None if no process used the parameter; a process that did not use it
    contributes zeros.

    Takes the arguments of NVIDIA Apex's class, in its order, then those of
    ``torch.nn.parallel.DistributedDataParallel``, by keyword. ``docs/distributed_data_parallel.md``
    explains each one.

    Args:
        module: the module to train; available as ``.module``.
        message_size: elements of a bucket; by default this many, and 8 MiB on the CPU.
        delay_allreduce: launch everything at the end of backward, in one message per dtype.
        shared_param: refused; shared parameters need no option.
        allreduce_trigger_params: parameters whose gradients launch the open buckets.
        retain_allreduce_buffers: ``gradient_as_bucket_view``, and ``allreduce_buffers`` lists them.
        allreduce_always_fp32: sum float16 and bfloat16 gradients in float32.
        num_allreduce_streams: number of communicators that buckets use in turn.
        allreduce_communicators: ``(groups, streams)`` to use in turn; the streams are not used.
        gradient_average: divide the sum by the number of processes; ``"weighted"``: by weights.
        gradient_predivide_factor: multiply by 1/f before the sum and by f/world_size after it.
        gradient_average_split_factor: no effect, as in Apex.
        prof: emit a profiler range around the forward of the wrapper.
        device_ids: ``[device]`` that inputs are moved to; ignored for a module on the CPU.
        output_device: move outputs there.
        dim: no effect.
        broadcast_buffers: broadcast rank 0's buffers before each training forward.
        forward_sync_buffers: True is the same as ``broadcast_buffers=True``.
        init_sync: broadcast rank 0's parameters at construction.
        process_group: the processes that take part; default all.
        bucket_cap_mb: bucket size in MiB, instead of ``message_size``.
        find_unused_parameters: no effect.
        check_reduction: raise if the processes are out of step; None: for parameters on the CPU.
        gradient_as_bucket_view: leave gradients as views of the buckets.
        static_graph: a promise that the set of parameters with a gradient does not change.
        delay_all_reduce_named_params, param_to_hook_all_reduce: no effect.
        mixed_precision: refused; use ``torch.autocast``.
        device_mesh: a one-dimensional mesh instead of ``process_group``.
        skip_all_reduce_unused_params: no effect.
        bucket_cap_mb_list: sizes in MiB: the first bucket's, and the largest for all others.
        batched_grad_copy, lazy_bucket_allocation: no effect.
        check_finite: raise on every process after an infinity or a NaN in a gradient.
        on_failure: what the others do after an exception in backward: ``"raise"`` or ``"skip"``.
        replica_check_every: compare all parameters once in this number of steps; 0: never.
        on_divergence: ``"warn"`` or ``"raise"`` if parameters differ.

    Raises:
        RuntimeError: if there is no process group, or the processes hold different models.
        TypeError, ValueError: for arguments out of range or contradictory.
        NotImplementedError: for a subclass that overrides internal methods of Apex's class.

    Construction, forward and backward are collective: every process of the group must take part.
    Construction blocks until all processes have joined. Not thread safe, except ``state_dict()``.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = _options.MESSAGE_SIZE,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Iterable[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool | str = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
        *,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = False,
        forward_sync_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        lazy_bucket_allocation: bool = False,
        check_finite: bool = False,
        on_failure: str = "raise",
        replica_check_every: int | None = None,
        on_divergence: str = "warn",
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}."
            )
        _names.refuse_overrides(type(self))
        options = _options.check(given)
        for name in _options.ATTRIBUTES:
            setattr(self, name, given[name])
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        self.parameters_to_ignore = options.ignored
        self._engine = engine = Engine(self, options, given["broadcast_buffers"])
        parameters = [parameter for _, parameter in engine.named_parameters()]
        self._input_device, self.output_device = _devices.single_device(
            given["device_ids"], output_device, parameters
        )
        self.device_ids = list(given["device_ids"]) if given["device_ids"] else None
        if not any(parameter.requires_grad for parameter in parameters):
            warnings.warn(
                "DistributedDataParallel wraps a module without a parameter that requires a "
                "gradient, so no gradients are synchronized and forward only calls the module.",
                stacklevel=2,
            )
        engine.connect(given["process_group"], allreduce_communicators)
        name_layers(module, self.process_group)

    @property
    def _reducer(self) -> _core.Reducer:
        return self._engine.connected()

    @property
    def process_group(self) -> Any:
        """The process group; None in a copy, before its first forward in ``train()``."""
        return self._engine.process_group

    @property
    def world_size(self) -> float:
        """The number of processes in the group."""
        return float(dist.get_world_size(self.process_group))

    # --- forward ---

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module with the same inputs and outputs."""
        if torch.compiler.is_compiling():
            return self._forward_untraced(inputs, kwargs, True)
        return self._forward(inputs, kwargs, False)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], under_trace: bool) -> Any:
        training = torch.is_grad_enabled()
        enter = self._enter_untraced if under_trace else self._enter
        leave = self._leave_untraced if under_trace else self._leave
        name = "apex.DistributedDataParallel.forward"
        with torch.profiler.record_function(name) if self.prof else _NO_RANGE:
            inputs, kwargs = enter(inputs, kwargs, training)
            active = _compile.active
            outer = active.wrapper
            if training and self._engine.splits_graphs:
                # Note [Compiled graphs are split by bucket] in _compile.py.
                active.wrapper = _compile.registry._active_ddp_module = self
            try:
                output = self._call_module(inputs, kwargs)
            finally:
                active.wrapper = _compile.registry._active_ddp_module = outer
            return leave(output, training)

    def _enter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._input_device is not None:
            inputs = _devices.move(inputs, self._input_device)
            kwargs = _devices.move(kwargs, self._input_device)
        if training:
            self._engine.prepare(self)
        return inputs, kwargs

    def _call_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(*inputs, **kwargs)

    def _leave(self, output: Any, training: bool) -> Any:
        if self.output_device is not None:
            output = _devices.move(output, self.output_device)
        reducer = self._engine.reducer
        if training and reducer is not None and output is not None:
            found = [output] if isinstance(output, torch.Tensor) else find_tensors(output)
            reducer.watch_outputs(found)
        return output

    # The engine cannot be traced. While torch.compile traces this class, the graph breaks before
    # and after the module, and the compiler starts with the frame of _call_module(). Calling these
    # functions imports torch._dynamo, which takes a second, so only compiled code calls them.
    _forward_untraced = torch._disable_dynamo(_forward, recursive=False)
    _enter_untraced = torch._disable_dynamo(_enter)
    _leave_untraced = torch._disable_dynamo(_leave)

    # --- accumulation ---

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward does not communicate: gradients accumulate in this process, and
        the next synchronized backward includes them. It affects backward, not forward, and may be
        nested. Every process must enter it for the same backwards."""
        before = self.require_backward_grad_sync
        self.disable_allreduce()
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def disable_allreduce(self) -> None:
        """From now on, backward does not communicate; see :meth:`no_sync`."""
        self._reducer.synchronizing = False

    def enable_allreduce(self) -> None:
        """From now on, backward communicates. The next one includes accumulated gradients."""
        self._reducer.synchronizing = True

    # --- weighted samples; see docs/weights.md ---

    def weight(self, weight: float | torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Sets the weight of this process's samples around backward: ``with model.weight(16):``.

        With ``gradient_average="weighted"``, gradients are divided by the sum of the weights of all
        processes: if each process sums the losses of its samples, by the number of samples. Weights
        add up under :meth:`no_sync`; several backwards in one block count once.

        Args:
            weight: not negative; a number, or a tensor with one element on any device. A CPU tensor
                is read immediately, a GPU tensor at the end of a synchronized backward.

        Raises:
            TypeError, ValueError: if ``weight`` is not one real number.
            RuntimeError: without ``gradient_average="weighted"``, inside another block, or during
                backward. If a weight is missing, negative or not finite, the synchronized backward
                raises on every process.
        """
        return Weight(self._engine, weight)

    @property
    def total_weight(self) -> float:
        """The sum of weights by which the last synchronized backward that was not skipped divided;
        initially 0. The same on every process."""
        return self._reducer.total_weight

    def weighted_mean(self, total: torch.Tensor) -> torch.Tensor:
        """The sum of ``total`` over all processes, divided by :attr:`total_weight`; for logging.

        Returns a new tensor of the same shape, in float32 or wider, without gradient; NaN or
        infinite if :attr:`total_weight` is 0. Collective. Not available under :meth:`join`.
        """
        summed = total.detach().to(torch.promote_types(total.dtype, torch.float32), copy=True)
        _core.all_reduce(summed, name_of(self.process_group))
        return summed.div_(self.total_weight)

    # --- skipped steps; see docs/training_loops.md ---

    @untraced
    def skip_step(self) -> torch.Tensor:
        """Skips this step on all processes together: a batch is bad, or forward has failed.

        Call it before this process's backward, or in a hook during it. The next synchronized
        backward (the current one, in a hook) ends on every process with ``.grad`` None for every
        parameter, and with :attr:`step_skipped`. Returns a zero loss, float32 of shape ``[]``, for
        a process that has no loss, since each process runs one backward. Does not block, unless
        parameters were added, removed or replaced; then it is collective.

        Raises:
            RuntimeError: on a GPU unless ``check_reduction=True`` or ``on_failure="skip"``; while a
                backward ends, as in a communication hook.
        """
        engine = self._engine
        if engine.reducer is not None and engine.module_changed():
            # The other processes detect the change in their forward, but this process may run no
            # forward.
            return engine.make_reducer(init_sync=True).skip_step()
        return self._reducer.skip_step()

    @property
    def step_skipped(self) -> bool:
        """Whether the last synchronized backward was skipped; the same on every process."""
        return self._reducer.step_skipped

    # --- communication hooks ---

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, Any], torch.futures.Future[Any]]
    ) -> None:
        """Replaces the all-reduce and averaging of each bucket by ``hook(state, bucket)``.

        ``bucket`` has the methods of ``torch.distributed.GradBucket``. The hook returns a
        ``torch.futures.Future`` whose value is the final gradients, a tensor with the elements of
        ``bucket.buffer()``. It is called on an autograd thread. Register one, on every process.

        Raises:
            TypeError: if ``hook`` is not callable.
            RuntimeError: if a hook is already registered.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook must be a function, got {type(hook).__name__}.")
        self._engine.set_comm_hook(RegisteredHook(state, hook))

    def register_builtin_comm_hook(self, name: str) -> None:
        """Communicates gradients in ``"fp16"`` or ``"bf16"``, without calling Python. Gradients in
        ``.grad`` keep their dtype. Register it on every process.

        Raises:
            ValueError: for another name.
            RuntimeError: if a hook is already registered.
        """
        self._engine.set_comm_hook(name)

    # --- uneven inputs; see docs/training_loops.md ---

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[Any]:
        """``with ddp.join():`` around a training loop whose number of batches differs by process.

        A process that leaves the block early takes part in the synchronized backwards of the
        others, with zeros. When all have left, every process has the parameters and buffers of one
        that trained to the end; buffers are not broadcast before that. On a GPU the host waits for
        the report of each backward.

        Args:
            divide_by_initial_world_size: False: divide gradients by the number of processes that
                still have data, not of all.
            enable: False disables it, for inputs that are known to be even.
            throw_on_early_termination: raise on every process as soon as one has run out of data.

        Raises:
            RuntimeError: if nested; for SyncBatchNorm; with master weights or a dynamic scale of
                ``apex.amp``; or, in backward, if gradients were kept.
        """
        if not enable:
            return contextlib.nullcontext()
        return Join(self._engine, divide_by_initial_world_size, throw_on_early_termination)

    # --- the plan ---

    def rebuild_buckets(self) -> None:
        """Discards the bucket plan: the next backward records the order of gradients and makes a
        new one. Call it on every process."""
        self._reducer.rebuild_buckets()

    @untraced
    def statistics(self) -> dict[str, float]:
        """Counts since construction (backwards, launches, copies), and two times of the last step,
        in seconds.

        ``last_backward_wait_s``: for how long this process waited in collectives of this package
        during the last synchronized backward (on a GPU, streams wait instead).
        ``last_step_compute_s``: from the end of the synchronized backward before it until all its
        buckets were launched, without such waits. ``apex/parallel/reducer.h`` lists the counts.
        """
        return self._reducer.statistics()

    # --- copies: the reducer, its groups and its communication hook belong to the process ---

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_engine": (self._engine.options, self.broadcast_buffers)}
        state.pop("device_mesh", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        base: Any = super()
        base.__setstate__(state)
        # Its first forward with gradients enabled connects to the default group.
        self._engine = Engine(self, *state["_engine"])
