# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel and Reducer, the Python side of the gradient reducer."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apex import _core
from apex._internal import not_served
from apex._internal.flat import flatten, unflatten
from apex._internal.group_names import name_of
from apex._internal.refused import DataParallelWrapper
from apex._internal.tree import find_tensors
from apex._internal.untraced import untraced
from apex.parallel import _compile, _options, _torch_names
from apex.parallel._comm_hook import RegisteredHook
from apex.parallel._engine import Engine, EngineOptions, refuse_backward
from apex.parallel._hooks import Hooks
from apex.parallel._join import Join
from apex.parallel._reducer import Reducer, flat_dist_call
from apex.parallel._tensor_lists import (
    apply_flat_dist_call,
    extract_tensors,
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

# The dispatch key that is active while a transform of torch.func runs. Querying torch._C._functorch
# would initialize thread state, which torch would then copy to every thread of every backward.
_IN_TRANSFORM = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode


class DistributedDataParallel(_torch_names.TorchNames, nn.Module, DataParallelWrapper):
    r"""Averages the gradients of a module over the processes of a group, during backward.

    Each process holds the whole module and trains on its own part of the batch. The constructor
    checks that all processes hold the same model and broadcasts rank 0's parameters, including
    frozen ones. During backward, gradients are collected in buckets. Each bucket is all-reduced as
    soon as it is complete, while the rest of backward is still running. When ``backward()``
    returns, every ``.grad`` holds the average over all processes. The first backward records the
    order in which gradients arrive and communicates at its end. So does the first backward after
    parameters were unfrozen, added or replaced. Freeze and unfreeze the same parameters on every
    process before the same backward.

    A parameter that no process used keeps ``grad=None``. If some processes used it, the others
    contribute zeros to the average. This needs no flag, and the set of used parameters may change
    from step to step. Parameters may be shared, used several times, and be part of checkpointed
    segments (reentrant or not). Backward may be called several times on one forward.

    Takes the arguments of NVIDIA Apex's class, in its order, then those of
    ``torch.nn.parallel.DistributedDataParallel``, by keyword. The guide explains each option:
    ``docs/distributed_data_parallel.md``.

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
        gradient_average: divide the sum by the number of processes, or ``"weighted"``: by the sum
            of their weights, see :meth:`weight`.
        gradient_predivide_factor: multiply by 1/f before the sum and by f/world_size after it.
        gradient_average_split_factor: ignored, as in Apex.
        prof: emit a profiler range around the forward of the wrapper.
        device_ids: ``[device]`` that inputs are moved to; ignored for a module on the CPU.
        output_device: move outputs there.
        dim, find_unused_parameters, delay_all_reduce_named_params, param_to_hook_all_reduce: no
            effect.
        broadcast_buffers: broadcast rank 0's buffers before each training forward. Default False,
            as in Apex; True in ``torch``.
        forward_sync_buffers: True is the same as ``broadcast_buffers=True``.
        init_sync: broadcast rank 0's parameters at construction.
        process_group: the processes that take part; default all.
        bucket_cap_mb: bucket size in MiB, instead of ``message_size``.
        check_reduction: raise on every process if the processes are out of step. None, the default,
            is True where the check is free: for parameters on the CPU.
        gradient_as_bucket_view: leave gradients as views of the buckets.
        static_graph: a promise that the set of parameters with a gradient does not change.
        mixed_precision: refused; use ``torch.autocast``.
        device_mesh: a one-dimensional mesh instead of ``process_group``.
        skip_all_reduce_unused_params: no effect (parameters that no rank uses are not communicated
            once the bucket plan is recorded).
        bucket_cap_mb_list: sizes in MiB, instead of ``bucket_cap_mb``. The first number is the size
            of the first bucket, and the largest number is the size of all other buckets.
        batched_grad_copy: no effect (gradients are copied by multi-tensor operations).
        lazy_bucket_allocation: no effect (buckets are allocated in the first backward).
        check_finite: raise on every process after an infinity or a NaN in a gradient.
        on_failure: what the other processes do if an exception ends backward on one process:
            ``"raise"``, or ``"skip"`` the step, see :meth:`skip_step`.
        replica_check_every: compare the trainable parameters of all processes bit for bit. Each
            synchronized backward compares a part, so that this many backwards compare all of them;
            0: never. None, the default, is 100 where the check is free: for parameters on the CPU,
            with ``init_sync``, without a communication hook and unless ``check_reduction=False``.
            Costs one read of the part. Not available under :meth:`join`.
        on_divergence: what to do if the parameters differ. ``"warn"`` writes to rank 0's standard
            error and to the logger ``apex.parallel.watch``. ``"raise"`` raises on every process.
        registered_buffers: allocate the buckets from the backend's own memory, if it has any.

    Raises:
        RuntimeError: if there is no process group, or the processes hold different models.
        ValueError: for contradictory arguments.

    Construction, forward and backward are collective: every process of the group must take part.
    Construction blocks until all processes have joined. Not thread safe.
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
        registered_buffers: bool = False,
        on_failure: str = "raise",
        replica_check_every: int | None = None,
        on_divergence: str = "warn",
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}."
            )
        if (message_size is None or isinstance(message_size, (list, tuple))) and device_ids is None:
            # Called as torch's class: DistributedDataParallel(module, [device], None).
            device_ids, message_size = message_size, _options.MESSAGE_SIZE
            delay_allreduce = _options.third_behind_device_ids(
                device_ids, delay_allreduce, shared_param
            )
        first_bucket_bytes = _options.FIRST_BUCKET_BYTES
        if bucket_cap_mb_list:
            bucket_cap_mb, first_bucket_bytes = _options.bucket_caps(bucket_cap_mb_list)
        message_size = _options.positive_message_size(message_size)
        _options.check_size(message_size, bucket_cap_mb)
        _options.check_streams(num_allreduce_streams, allreduce_communicators, delay_allreduce)
        if shared_param is not None:
            not_served.refuse("DistributedDataParallel(shared_param=...)", ValueError)
        if mixed_precision is not None:
            not_served.refuse("DistributedDataParallel(mixed_precision=...)", ValueError)
        if device_mesh is not None:
            if process_group is not None:
                raise ValueError(
                    "process_group and device_mesh both choose the ranks: pass only one of them."
                )
            self.device_mesh = device_mesh
            process_group = device_mesh.get_group()

        self.module = module
        self.parameters_to_ignore = set(getattr(module, _torch_names.IGNORED, ()))
        self.message_size = message_size
        self.bucket_cap_mb = bucket_cap_mb
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = _options.switch(
            "retain_allreduce_buffers", retain_allreduce_buffers
        )
        self.gradient_as_bucket_view = gradient_as_bucket_view or retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.num_allreduce_streams = num_allreduce_streams
        self.gradient_average = _options.average(gradient_average)
        self.gradient_predivide_factor = float(gradient_predivide_factor)
        self.prof = _options.switch("prof", prof)
        self.dim = dim
        self.init_sync = _options.switch("init_sync", init_sync)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.check_finite = check_finite
        self.check_reduction = (
            None if check_reduction is None else _options.switch("check_reduction", check_reduction)
        )
        self.registered_buffers = registered_buffers
        self.on_failure = _options.one_of("on_failure", on_failure, ("raise", "skip"))
        actions = ("raise", "warn")
        self.on_divergence = _options.one_of("on_divergence", on_divergence, actions)
        self.replica_check_every = _options.checks_every(replica_check_every)
        options = EngineOptions(
            reducer={
                **_options.bucket_limits(message_size, bucket_cap_mb, first_bucket_bytes),
                **{
                    name: _options.switch(name, getattr(self, name))
                    for name in _options.SWITCHES_OF_THE_ENGINE
                },
                "gradient_average": bool(self.gradient_average),
                "weighted": self.gradient_average == "weighted",
                "gradient_predivide_factor": self.gradient_predivide_factor,
                "check_steps": self.check_reduction,
                "skip_failed_steps": on_failure == "skip",
                "replica_check_every": self.replica_check_every,
                "on_divergence": self.on_divergence,
                "begins_alike": self.init_sync,
            },
            settings=_options.settings(
                num_allreduce_streams=(num_allreduce_streams, 1),
                registered_buffers=(bool(registered_buffers), False),
            ),
            trigger_names=_options.trigger_names(allreduce_trigger_params, module),
            ignored=self.parameters_to_ignore,
            communicators=num_allreduce_streams,
            overlaps=not delay_allreduce,
        )
        hooks = Hooks()
        copies = _options.switch("broadcast_buffers", broadcast_buffers)
        if forward_sync_buffers is not None:
            copies |= _options.switch("forward_sync_buffers", forward_sync_buffers)
        self._engine = engine = Engine(self, options, hooks, copies)
        parameters = [parameter for _, parameter in engine.named_parameters()]
        self._input_device, self._output_device = _options.single_device(
            device_ids, output_device, parameters
        )
        self.device_ids = list(device_ids) if device_ids else None
        self.output_device = self._output_device
        if not any(parameter.requires_grad for parameter in parameters):
            warnings.warn(
                "DistributedDataParallel wraps a module without a parameter that requires a "
                "gradient, so no gradients are synchronized and forward only calls the module.",
                stacklevel=2,
            )
        engine.connect(process_group, allreduce_communicators, self.init_sync)
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
        return float(self._engine.world_size)

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
            inputs = _options.move(inputs, self._input_device)
            kwargs = _options.move(kwargs, self._input_device)
        if training:
            self._prepare()
        return inputs, kwargs

    def _call_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(*inputs, **kwargs)

    def _leave(self, output: Any, training: bool) -> Any:
        if self._output_device is not None:
            output = _options.move(output, self._output_device)
        if training and output is not None:
            found = [output] if isinstance(output, torch.Tensor) else find_tensors(output)
            reducer = self._engine.reducer
            if reducer is None:
                refuse_backward(found)
            else:
                reducer.watch_outputs(found)
        return output

    # The engine cannot be traced. While torch.compile traces this class, the graph breaks before
    # and after the module, and the compiler starts with the frame of _call_module(). Calling these
    # functions imports torch._dynamo, which takes a second, so only compiled code calls them.
    _forward_untraced = torch._disable_dynamo(_forward, recursive=False)
    _enter_untraced = torch._disable_dynamo(_enter)
    _leave_untraced = torch._disable_dynamo(_leave)

    def _prepare(self) -> None:
        engine = self._engine
        reducer = engine.reducer
        if reducer is None and not self.training:
            return  # some ranks may evaluate alone; see refuse_backward()
        changed = reducer is None or engine.module_changed()
        if torch._C._dispatch_tls_is_dispatch_key_included(_IN_TRANSFORM):
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
            reducer = engine.connected()
        elif changed:
            if engine.join is not None:
                raise RuntimeError(
                    "parameters were added, removed or replaced under join(): make such changes "
                    "before join(), on every rank."
                )
            reducer = engine.make_reducer(init_sync=True)
        reducer.prepare_for_forward()
        buffers = (
            engine.broadcast_buffers
            and self.training
            and self.require_forward_param_sync
            and reducer.synchronizing
        )
        root = 0 if engine.join is None else engine.join.announce_forward(buffers)
        if buffers:
            engine.sync_buffers(root)

    # --- accumulation ---

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward does not communicate: gradients accumulate in this process.

        The next synchronized backward includes the accumulated gradients. The context affects
        backward, not forward. It may be nested and may be left by an exception. Every process must
        enter it for the same backwards.
        """
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

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that starts now communicates."""
        return self._reducer.synchronizing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on: bool) -> None:
        self._reducer.synchronizing = bool(on)

    # --- weighted samples ---

    def weight(self, weight: float | torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Sets the weight of this process's samples: ``with model.weight(len(batch)):`` around
        backward.

        With ``gradient_average="weighted"``, a synchronized backward leaves in every ``.grad`` the
        sum of the gradients of all processes divided by the sum of their weights. If each process
        sums the losses of its samples, this is the gradient of the mean over the samples of all
        processes, for any numbers of samples::

            with model.weight(mask.sum()):
                cross_entropy(model(x), y, reduction="sum").backward()

        Forward may be inside or before the block. Weights add up under :meth:`no_sync`. Several
        backwards in one block use the same samples, so their weight counts once. A process without
        samples passes 0, or runs backward on the loss of :meth:`skip_step`, which skips the step on
        all processes. A process that has run out of data under :meth:`join` has weight 0. If all
        weights are 0, gradients are 0 and a warning is issued once.

        Args:
            weight: not negative; a number, or a tensor with one element on any device. A CPU tensor
                is read immediately, a GPU tensor at the end of a synchronized backward.

        If a weight is missing, negative or not finite, the synchronized backward raises on every
        process. A backward that fails or is skipped drops its weights, and so does ``zero_grad()``
        (``set_to_none=True``) in the middle of an accumulation. Communication hooks average over
        the processes, and this average is converted to the weighted one. A hook that communicates
        float16 needs weights whose sums fit into float16 (thousands of samples, for example).

        Raises:
            TypeError, ValueError: if ``weight`` is not one real number.
            RuntimeError: without ``gradient_average="weighted"``, inside another block, or during
                backward.
        """
        return Weight(self._engine, weight)

    @property
    def total_weight(self) -> float:
        """The sum of weights by which the last synchronized backward divided; initially 0.

        Skipped backwards do not change it. It is the same on every process.
        """
        return self._reducer.total_weight

    def weighted_mean(self, total: torch.Tensor) -> torch.Tensor:
        """The sum of ``total`` over all processes, divided by :attr:`total_weight`; for logging.

        If ``loss`` is the sum of this process's losses in the last step, then
        ``model.weighted_mean(loss)`` is the mean loss of that step. Returns a new tensor without
        gradient, of the same shape, in float32 or wider. It is NaN or infinite if
        :attr:`total_weight` is 0. Collective. Not available under :meth:`join`, where a process may
        have run out of data.
        """
        summed = total.detach().to(torch.promote_types(total.dtype, torch.float32), copy=True)
        _core.all_reduce(summed, name_of(self.process_group), average=False)
        return summed.div_(self.total_weight)

    # --- skipped steps ---

    @untraced
    def skip_step(self) -> torch.Tensor:
        """Skips this step on all processes together; see ``docs/training_loops.md``.

        Use it for a non-finite loss, a batch without a valid sample, or a forward that ran out of
        memory. Any process may call it before its backward, or in a hook during backward. The next
        synchronized backward (the current one, if called in a hook) then ends on every process with
        ``.grad`` None for every parameter, and :attr:`step_skipped` is True. The following
        optimizer step changes nothing. Gradients that :meth:`no_sync` has accumulated for this step
        are dropped too.

        Returns a zero loss, float32 of shape ``[]``, for a process that has no loss::

            loss = criterion(model(x), y) if len(x) else model.skip_step()
            loss.backward()
            optimizer.step()

        Its backward takes part in the backward of the other processes. A process that has a loss
        may run backward on that instead. Either way, each process runs one backward. Does not
        block, unless parameters were added, removed or replaced. Then it is collective, as forward
        is. Not thread safe.

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

        ``bucket`` has the methods of ``torch.distributed.GradBucket``, so the hooks of
        ``torch.distributed.algorithms.ddp_comm_hooks`` can be used. The hook returns a
        ``torch.futures.Future`` whose value is the final gradients, a tensor like
        ``bucket.buffer()``. The hook is called in launch order, on an autograd thread. Register it
        once, on every process.

        Raises:
            TypeError: if ``hook`` is not callable.
            RuntimeError: if a hook is already registered.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook must be a function, got {type(hook).__name__}.")
        self._engine.hooks.set_comm_hook(self._reducer, RegisteredHook(state, hook))

    def register_builtin_comm_hook(self, name: str) -> None:
        """Communicates gradients in a low-precision dtype, without calling Python.

        Args:
            name: ``"fp16"`` or ``"bf16"``: an all-reduce in that dtype.

        Register at most one hook, the same on every process. Gradients in ``.grad`` keep their
        dtype.

        Raises:
            ValueError: for another name.
            RuntimeError: if a hook is already registered.
        """
        self._engine.hooks.set_comm_hook(self._reducer, name)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """As in torch: FP16_COMPRESS is ``"fp16"``. ALLREDUCE is the default without a hook."""
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS:
            self.register_builtin_comm_hook("fp16")

    # --- uneven inputs ---

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[Any]:
        """``with ddp.join():`` around a training loop whose number of batches differs by process.

        A process that leaves the block early takes part in the remaining collectives of the others.
        It receives buffers in forwards, contributes zero gradients in backwards, and passes an
        empty batch to SyncBatchNorm. When all have left, every process has the parameters and
        buffers of a process that trained to the end. Optimizer states are not synchronized.

        Args:
            divide_by_initial_world_size: divide gradients by the number of processes. False: divide
                by the number of processes that still have data.
            enable: False disables it, for inputs that are known to be even.
            throw_on_early_termination: raise on every process as soon as one has run out of data.

        Each forward and each backward is announced to the others by a small all-reduce, for which
        the host waits. In each step, all processes with data must run the same forwards and
        backwards. The module's only collectives may be those of SyncBatchNorm over all processes.

        Raises:
            RuntimeError: if nested; with master weights or a dynamic scale of ``apex.amp``; with
                ``throw_on_early_termination``, as above; or if processes with data run different
                forwards or backwards.
        """
        if not enable:
            return contextlib.nullcontext()
        return Join(self._engine, divide_by_initial_world_size, throw_on_early_termination)

    # --- the plan ---

    @property
    def allreduce_buffers(self) -> list[torch.Tensor]:
        """The flat buffers, ``[elements]`` each, in launch order, with
        ``retain_allreduce_buffers``.

        Gradients are views of them. Empty before the first backward, and after a failed one.
        """
        if not self.retain_allreduce_buffers:
            return []
        return self._reducer.buffers()

    @property
    def needs_refresh(self) -> bool:
        """Whether the next backward records the order of gradients."""
        return self._reducer.plan() is None

    @property
    def active_params(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        return [p for _, p in self._engine.named_parameters() if p.requires_grad]

    @property
    def bucket_bytes_cap(self) -> int:
        """The bucket size in bytes by which torch.compile splits the module's graph."""
        return _compile.bucket_bytes(
            self.module.parameters(), self.message_size, self.bucket_cap_mb
        )

    def rebuild_buckets(self) -> None:
        """Discards the bucket plan: the next backward records the order of gradients and makes a
        new one. Call it on every process."""
        self._reducer.rebuild_buckets()

    def _set_static_graph(self) -> None:
        """Same as ``static_graph=True``. Call it before the first backward, on every process."""
        if not self.static_graph:
            self.static_graph = True
            self._engine.set_static_graph()

    @untraced
    def statistics(self) -> dict[str, float]:
        """Counts since construction (backwards, launches, copies), and two times of the last step.

        ``last_backward_wait_s``: seconds for which this process waited in collectives of this
        package during the last synchronized backward (on a GPU, streams wait instead).
        ``last_step_compute_s``: seconds from the end of the synchronized backward before it until
        all its buckets were launched, without such waits; on a slow process it is longer than on
        the others. Counts are integers; ``apex/parallel/reducer.h`` lists them.
        """
        return self._reducer.statistics()

    # --- copies: the engine and the groups belong to the process ---

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_engine": copy.copy(self._engine)}
        state.pop("device_mesh", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        base: Any = super()
        base.__setstate__(state)
        # The first forward in train() connects to the default group; evaluation needs none.
        self._engine.belong_to(self)
