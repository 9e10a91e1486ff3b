# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel and Reducer, the Python side of the gradient reducer."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import join as torch_join

from apex import _core
from apex._internal.flat import flatten, unflatten
from apex._internal.refused import DataParallelWrapper
from apex._internal.tree import find_tensors
from apex.parallel import _compile, _in_backward, _options, _state_dicts, _torch_names
from apex.parallel._comm_hook import RegisteredHook
from apex.parallel._engine import Engine, EngineOptions, refuse_backward
from apex.parallel._hooks import Hooks, ReducedBucket
from apex.parallel._join import Join, TorchJoin, TorchJoinHook
from apex.parallel._mixed_precision import Casts, MixedPrecision
from apex.parallel._read_through import ReadsThrough
from apex.parallel._reducer import Reducer, flat_dist_call
from apex.parallel._tensor_lists import (
    apply_flat_dist_call,
    extract_tensors,
    split_by_type,
    split_half_float_double,
)
from apex.parallel._timeline import FORWARD
from apex.parallel._weight import Weight
from apex.parallel.gradient_statistics import GradientStatistics, ParameterNorms, clip
from apex.parallel.overlap_report import BucketOverlap, OverlapReport
from apex.parallel.straggler_report import RankTimes, StragglerReport
from apex.parallel.sync_batchnorm import name_layers

__all__ = [
    "DistributedDataParallel",
    "ReducedBucket",
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

# Of the dispatcher, while a transform of torch.func runs. To ask torch._C._functorch would give the
# thread a state that torch copies whenever a backward passes on the thread's state.
_IN_TRANSFORM = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode


class DistributedDataParallel(ReadsThrough, _torch_names.TorchNames, DataParallelWrapper):
    r"""Averages the gradients of a module over the processes of a group, during backward.

    Each process holds the whole module and works on its own part of the batch. At construction the
    processes check that they hold the same model and take rank 0's parameters, frozen ones
    included. During backward, gradients are put into buckets and each bucket is all-reduced as soon
    as it is complete, while the rest of backward is still running; when ``backward()`` returns,
    every ``.grad`` holds the average over all processes. The first backward (and the first with
    another set of trainable parameters, or after parameters were added or replaced) records the
    order in which gradients arrive and communicates at its end. Freeze and unfreeze the same
    parameters on every process before the same backward.

    A parameter that no process used keeps ``grad=None``; one that some processes used gets the
    average with zeros for the others: no flag is needed, and the choice may change from step to
    step. Parameters may be shared, used several times, and be part of checkpointed segments
    (reentrant or not). Backward may be called several times on one forward.

    Takes the arguments of NVIDIA Apex's class, in its order, then those of
    ``torch.nn.parallel.DistributedDataParallel``, by keyword.

    Args:
        module: the module to train; reachable as ``.module``.
        message_size: a bucket is sent as soon as it holds this many elements. The default goes by
            the device: 8 MiB on the CPU, this many elements elsewhere, with a first bucket of 1 MiB
            where there has to be more than one.
        delay_allreduce: send everything at the end of backward, in one message per dtype.
        shared_param: refused; shared parameters need no option.
        allreduce_trigger_params: parameters at whose gradients the open buckets are sent, instead
            of by size. Those that replace them later, under the same names, take their place; one
            that is frozen or removed closes no bucket, and without any left, sizes do.
        retain_allreduce_buffers: keep gradients as views of the buckets, which are then listed in
            ``allreduce_buffers``. The same as ``gradient_as_bucket_view``.
        allreduce_always_fp32: sum float16 and bfloat16 gradients in float32.
        num_allreduce_streams: number of communicators that buckets use in turn.
        allreduce_communicators: ``(groups, streams)`` to use for that; streams are not needed,
            since each communicator has its own.
        gradient_average: divide the sum by the number of processes; or ``"weighted"``: by the sum
            of the weights of all processes, see :meth:`weight`. If it is not True, gradients must
            be cleared between two synchronized backwards.
        gradient_predivide_factor: multiply by 1/f before the sum and by f/world_size after it.
        gradient_average_split_factor: ignored, as in Apex.
        prof: emit a profiler range around the forward of the wrapper.
        device_ids: ``[device]`` of this process: inputs are moved there. Ignored for a module on
            the CPU.
        output_device: move outputs there.
        dim: no effect (a process drives one device).
        broadcast_buffers: take rank 0's buffers at construction and before each training forward.
            Default False, as in Apex; ``torch``'s class has True.
        forward_sync_buffers: True is the same as ``broadcast_buffers=True``; any other value has no
            effect.
        init_sync: take rank 0's parameters at construction.
        process_group: the processes that take part; default all.
        bucket_cap_mb: bucket size in MiB, instead of ``message_size``; the first bucket is then at
            most 1 MiB, as in ``torch``.
        find_unused_parameters: no effect (not needed).
        check_reduction: after each backward, raise on every process if they are out of step: if
            some have run one more backward, one without synchronization, or an optimizer's step
            that the others have not, so that gradients of different steps were averaged. None, the
            default, is True where that costs nothing, for parameters on the CPU; on other devices
            the host waits for it.
        gradient_as_bucket_view: leave gradients as views of the buckets, which saves a copy and
            memory.
        static_graph: promise that the set of parameters that get a gradient does not change after
            the first backward.
        delay_all_reduce_named_params: no effect on the result: these are reduced with the others.
        param_to_hook_all_reduce: no effect, see ``delay_all_reduce_named_params``.
        mixed_precision: an object with ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``, as
            torch's ``_MixedPrecision``: forward runs on casts of parameters, inputs and buffers;
            gradients travel in ``reduce_dtype`` (default: ``param_dtype``) and arrive in the
            parameters' own dtype.
        device_mesh: a one-dimensional mesh in place of ``process_group``.
        skip_all_reduce_unused_params: no effect (parameters that no rank used are never sent, once
            that is learnt).
        bucket_cap_mb_list: sizes in MiB: the first number is that of the first bucket, the largest
            that of all others, in place of ``bucket_cap_mb``. For other sizes, bucket by bucket,
            there is :meth:`load_bucket_plan`.
        batched_grad_copy: no effect (gradients are copied by multi-tensor operations).
        lazy_bucket_allocation: no effect (buckets are allocated in the first backward).
        check_finite: raise on every process after a backward to which a process contributed an
            infinity or a NaN, naming the first process and parameter. Costs a read of the
            gradients, and on a GPU a wait of the host.
        on_failure: what the other processes do in a backward that an exception ends on one:
            ``"raise"``, or ``"skip"`` the step, see :meth:`skip_step`. With ``check_finite`` a
            gradient that is not finite counts as a failure of all. With ``"skip"`` the host waits
            for a GPU in every backward.
        gradient_statistics: measure gradients while they are copied, for
            :meth:`gradient_statistics` and :meth:`clip_grad_norm_`. On a GPU it is a read of them
            before and one after the average, and the host waits.
        replica_check_every: compare the state of all processes bit for bit, a part in each
            synchronized backward, so that all of it is compared in so many; 0: never. None, the
            default, is 100 where that costs nothing: for parameters on the CPU, with ``init_sync``,
            without a communication hook and unless ``check_reduction=False``. Compared are
            parameters, master weights of ``amp``, and buffers of SyncBatchNorm. Costs one read of
            the part. Not under :meth:`join`, and not with an :class:`OverlappedOptimizer`.
        on_divergence: what to do where they differ: ``"warn"``, on rank 0's standard error and in
            the logger ``apex.parallel.watch``; ``"raise"`` on every process; or ``"resync"``: warn,
            take over what most processes hold (or the first), and skip the step; the fourth time
            without a clean round raises.
        registered_buffers: take the buckets' memory from the backend where it has some of its own.
            With NCCL it is registered with the communicator, which may then reduce without copying.
            Elsewhere a warning is logged once, and torch's memory is used.

    Raises:
        RuntimeError: if there is no process group, the processes hold different models, or an
            optimizer steps parameters inside backward.
        ValueError: for arguments that contradict each other.

    Attributes and methods of the module that the wrapper does not have are read through it:
    ``model.fc`` is ``model.module.fc``, but for names that begin with an underscore. They are set
    on ``model.module``.

    Construction, forward and backward are collective: every process of the group has to take part.
    Construction blocks until all processes have come. Not thread safe.
    """

    @_options.suggests_keywords
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
        gradient_statistics: bool = False,
        replica_check_every: int | None = None,
        on_divergence: str = "warn",
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}."
            )
        if (message_size is None or isinstance(message_size, (list, tuple))) and device_ids is None:
            # DistributedDataParallel(module, [device], None), as torch's class is called.
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
            raise ValueError(
                "shared_param is not an option any more: a parameter used in several places needs "
                "none; remove the argument."
            )
        _options.warn_ignored(gradient_average_split_factor)
        if device_mesh is not None:
            if process_group is not None:
                raise ValueError(
                    "process_group and device_mesh both name the ranks: give one of them."
                )
            self.device_mesh = device_mesh
            process_group = device_mesh.get_group()

        self.module = module
        self.parameters_to_ignore = set(getattr(module, _torch_names.IGNORED, ()))
        self.message_size = message_size
        self.bucket_cap_mb = bucket_cap_mb
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view or retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.num_allreduce_streams = num_allreduce_streams
        self.gradient_average = _options.average(gradient_average)
        self.gradient_predivide_factor = float(gradient_predivide_factor)
        self.prof = prof
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
        actions = ("raise", "warn", "resync")
        self.on_divergence = _options.one_of("on_divergence", on_divergence, actions)
        self.replica_check_every = _options.checks_every(replica_check_every)
        self._torch_join: TorchJoin | None = None  # made last
        mixed = None if mixed_precision is None else MixedPrecision(mixed_precision)
        self._mixed_precision = mixed
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
                "gradient_statistics": _options.switch("gradient_statistics", gradient_statistics),
                "replica_check_every": self.replica_check_every,
                "on_divergence": self.on_divergence,
            },
            settings=_options.settings(
                num_allreduce_streams=(num_allreduce_streams, 1),
                registered_buffers=(bool(registered_buffers), False),
                mixed_precision=(None if mixed is None else mixed.describe(), None),
            ),
            trigger_names=_options.trigger_names(allreduce_trigger_params, module),
            ignored=self.parameters_to_ignore,
            communicators=num_allreduce_streams,
            overlaps=not delay_allreduce and mixed is None,
        )
        hooks = Hooks(None if mixed is None else mixed.wire)
        self._engine = engine = Engine(
            self, options, hooks, broadcast_buffers or bool(forward_sync_buffers)
        )
        parameters = [parameter for _, parameter in engine.named_parameters()]
        self._input_device, self._output_device = _options.single_device(
            device_ids, output_device, parameters
        )
        self.device_ids = list(device_ids) if device_ids else None
        self.output_device = self._output_device
        if not any(parameter.requires_grad for parameter in parameters):
            warnings.warn(
                "DistributedDataParallel wraps a module without a parameter that requires a "
                "gradient: forward passes through and nothing is synchronized.",
                stacklevel=3,  # above suggests_keywords
            )
        engine.connect(process_group, allreduce_communicators, self.init_sync)
        name_layers(module, self.process_group)
        self._refuse_steps_in_backward()

    def _refuse_steps_in_backward(self) -> None:
        # After what is collective, so that no rank waits for one that raises.
        _in_backward.refuse(self.module, self.process_group, self.parameters_to_ignore)
        self._stepped_in_backward = _in_backward.parameters_known()

    @property
    def _reducer(self) -> _core.Reducer:
        return self._engine.connected()

    @property
    def process_group(self) -> Any:
        """The processes that take part; None in a copy, before its first forward in ``train()``."""
        return self._engine.process_group

    @property
    def world_size(self) -> float:
        """Their number."""
        return float(self._engine.world_size)

    # --- forward ---

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module; inputs and outputs are its own."""
        if torch.compiler.is_compiling():
            return self._forward_untraced(inputs, kwargs, True)
        return self._forward(inputs, kwargs, False)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], under_trace: bool) -> Any:
        training = torch.is_grad_enabled()
        enter = self._enter_untraced if under_trace else self._enter
        leave = self._leave_untraced if under_trace else self._leave
        name = "apex.DistributedDataParallel.forward"
        timeline = self._engine.hooks.timeline
        with (
            torch.profiler.record_function(name) if self.prof else _NO_RANGE,
            timeline.span(FORWARD) if timeline is not None and training else _NO_RANGE,
        ):
            inputs, kwargs, casts = enter(inputs, kwargs, training)
            outer = _compile.registry._active_ddp_module
            if training and self._engine.splits_graphs:
                # Note [Compiled graphs are split by bucket] in _compile.py.
                _compile.registry._active_ddp_module = self
            try:
                output = self._call_module(inputs, kwargs)
            except BaseException:
                if casts is not None and self._mixed_precision is not None:
                    self._mixed_precision.put_back(casts)
                raise
            finally:
                _compile.registry._active_ddp_module = outer
            return leave(output, training, casts)

    def _enter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], Casts | None]:
        if self._input_device is not None:
            inputs = _options.move(inputs, self._input_device)
            kwargs = _options.move(kwargs, self._input_device)
        if training:
            self._prepare()
        if self._mixed_precision is None:
            return inputs, kwargs, None
        return self._mixed_precision.enter(self.module, inputs, kwargs)

    def _call_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(*inputs, **kwargs)

    def _leave(self, output: Any, training: bool, casts: Casts | None) -> Any:
        if casts is not None and self._mixed_precision is not None:
            self._mixed_precision.put_back(casts)
            self._mixed_precision.leave(self.module, casts, output, training)
        if self._output_device is not None:
            output = _options.move(output, self._output_device)
        if training and output is not None:
            found: torch.Tensor | list[torch.Tensor]
            found = output if isinstance(output, torch.Tensor) else find_tensors(output)
            reducer = self._engine.reducer
            if reducer is None:
                refuse_backward([found] if isinstance(found, torch.Tensor) else found)
            else:
                reducer.watch_outputs(found)
        return output

    # The engine cannot be traced. While torch.compile traces this class, the graph is broken before
    # and after the module; of what runs then, the compiler begins with the frame of _call_module().
    # Calling these imports torch._dynamo, which takes a second, so nothing else does.
    _forward_untraced = torch._disable_dynamo(_forward, recursive=False)
    _enter_untraced = torch._disable_dynamo(_enter)
    _leave_untraced = torch._disable_dynamo(_leave)

    def _prepare(self) -> None:
        engine, mixed = self._engine, self._mixed_precision
        reducer = engine.reducer
        if reducer is None and not self.training:
            return  # some ranks may evaluate alone; see refuse_backward()
        changed = reducer is None or (
            (mixed is None or not mixed.in_place) and engine.module_changed()
        )
        if torch._C._dispatch_tls_is_dispatch_key_included(_IN_TRANSFORM):
            # Within a transform of torch.func nothing is sent. What reaches parameters in a
            # backward around it is averaged.
            if reducer is None or changed:
                raise RuntimeError(
                    "this DistributedDataParallel has no engine yet for the parameters it has now, "
                    "and transforms of torch.func communicate nothing: run one forward outside of "
                    "them before, on every rank."
                )
            reducer.prepare_for_forward()
            return
        if reducer is None:
            reducer = engine.connected()
        elif changed:
            if engine.join is not None:
                raise RuntimeError("parameters were added, removed or replaced under join().")
            reducer = engine.make_reducer(init_sync=True)
        if self._stepped_in_backward != _in_backward.parameters_known():
            self._refuse_steps_in_backward()
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
        """Within it backward does not communicate: gradients accumulate in this process.

        What accumulated is part of the next synchronized backward. Takes effect at backward, not at
        forward. May be nested, and may be left by an exception. Every process has to do the same.
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
        """From now on, backward communicates; the next one takes along what has accumulated."""
        self._reducer.synchronizing = True

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that begins now communicates."""
        return self._reducer.synchronizing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on: bool) -> None:
        self._reducer.synchronizing = bool(on)

    # --- samples that count differently ---

    def weight(self, weight: float | torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """``with model.weight(len(batch)):`` around a backward: how much its samples count.

        With ``gradient_average="weighted"`` a synchronized backward leaves in every ``.grad`` the
        sum of the gradients of all processes, divided by the sum of their weights. If each process
        sums its losses over its samples, that is the gradient of the mean over the samples of all
        processes, however many each of them has::

            with model.weight(mask.sum()):
                cross_entropy(model(x), y, reduction="sum").backward()

        Forward may be inside or before. Weights add up under :meth:`no_sync`; several backwards
        in one block are of the same samples, which count once. A process without samples gives 0,
        or runs backward on :meth:`skip_step`'s loss, which skips the step for all. One that has run
        out under :meth:`join` counts 0. If all weights are 0, gradients are 0 and a warning is
        given once.

        Args:
            weight: not negative; a number, or a tensor with one element on any device. One on the
                CPU is read at once, one on a GPU at the end of a synchronized backward.

        A weight that is missing, negative or not finite makes the synchronized backward raise on
        every process. One that fails or is skipped drops the weights that belong to it, and so does
        ``zero_grad()`` (``set_to_none=True``) in the middle of an accumulation. Communication hooks
        average over the processes, which is undone; one that sends float16 needs weights of which
        sums fit there (of thousands of samples, say). An :class:`OverlappedOptimizer` waits for all
        buckets at the end of backward.

        Raises:
            TypeError, ValueError: if it is not one real number.
            RuntimeError: without ``gradient_average="weighted"``, inside of another block, or
                during backward.
        """
        return Weight(self._engine, weight)

    @property
    def total_weight(self) -> float:
        """By what the last synchronized backward that was not skipped divided; at first 0.

        The same on every process.
        """
        return self._reducer.total_weight

    def weighted_mean(self, total: torch.Tensor) -> torch.Tensor:
        """The sum of ``total`` over all processes, divided by :attr:`total_weight`; for logging.

        ``model.weighted_mean(loss)`` is the mean loss of the last step, if ``loss`` is the sum of
        this process's losses in it. Returns a new tensor, of the same shape and of float32 or
        wider; NaN or infinite if :attr:`total_weight` is 0. The values are those of ``total`` as it
        is, without a gradient. Collective: not under :meth:`join`, where a process may have run
        out.
        """
        summed = total.detach().to(torch.promote_types(total.dtype, torch.float32), copy=True)
        dist.all_reduce(summed, group=self.process_group)
        return summed.div_(self.total_weight)

    # --- steps that are skipped ---

    def skip_step(self) -> torch.Tensor:
        """Skips this step on all processes together; see ``docs/howto/skipped_steps.md``.

        For a loss that is not finite, a batch without a valid sample, a forward for which memory
        did not suffice. Any process may call it before its backward, or in a hook during it. The
        next synchronized backward (during backward: this one) then ends on every process with
        ``.grad`` None for every parameter, and :attr:`step_skipped` is True; the optimizer's step
        that follows has nothing to do. What was accumulated before under :meth:`no_sync` for this
        step is dropped as well.

        Returns a zero loss, of shape [] and float32, for a process that has none::

            loss = criterion(model(x), y) if len(x) else model.skip_step()
            loss.backward()
            optimizer.step()

        Its backward takes part in that of the other processes. A process that has a loss may run
        backward on that instead; either way each process runs one. Does not block, unless
        parameters were added, removed or replaced: then it is collective, as forward is. Not thread
        safe.

        Raises:
            RuntimeError: with :class:`OverlappedOptimizer`; with a bucket callback unless
                ``on_failure="skip"``; on a GPU unless ``check_reduction=True`` or
                ``on_failure="skip"``; while a backward ends, as in a bucket callback.
        """
        engine, mixed = self._engine, self._mixed_precision
        in_place = mixed is not None and mixed.in_place
        if engine.reducer is not None and not in_place and engine.module_changed():
            # The other processes notice the change in their forward, of which there may be none
            # here.
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
        self._engine.hooks.set_comm_hook(self._reducer, RegisteredHook(state, hook))

    def register_builtin_comm_hook(self, name: str) -> None:
        """Communicates gradients in a low-precision dtype, without Python on the way.

        Args:
            name: ``"fp16"`` or ``"bf16"``: an all-reduce in that dtype. ``"fp16_fp32_sum"`` or
                ``"bf16_fp32_sum"``: that communication dtype, sums in float32 (a reduce-scatter by
                all-to-all, then an all-gather), so that the rounding does not grow with the number
                of processes.

        Register one hook at most, the same on every process. Gradients in ``.grad`` keep their
        dtype.

        Raises:
            ValueError: for another name.
            RuntimeError: if there is a hook already.
        """
        self._engine.hooks.set_comm_hook(self._reducer, name)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """As torch's: FP16_COMPRESS is ``"fp16"``; ALLREDUCE is what happens without a hook."""
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS:
            self.register_builtin_comm_hook("fp16")

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
        self._engine.hooks.set_callback(self._reducer, callback)

    # --- uneven inputs ---

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
        return Join(self._engine, divide_by_initial_world_size, throw_on_early_termination, scalers)

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
        """Where torch's Join puts what it communicates: the module's device."""
        return self._engine.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The processes that torch's Join counts."""
        group: dist.ProcessGroup = self.process_group
        return group

    # --- the plan ---

    @property
    def allreduce_buffers(self) -> list[torch.Tensor]:
        """The flat buffers, [elements] each, in launch order, with ``retain_allreduce_buffers``.

        Gradients are views of them. Empty before the first backward, and after one that failed.
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
        """The size of a bucket in bytes, by which torch.compile splits the module's graph."""
        return _compile.bucket_bytes(
            self.module.parameters(), self.message_size, self.bucket_cap_mb
        )

    def relearn(self) -> None:
        """Forget the order of gradients; the next backward records it. Call on every process."""
        self._reducer.relearn()

    def bucket_plan(self) -> list[list[str]] | None:
        """The names of the parameters in each bucket, in launch order; None before it is recorded.

        Save it for the same model, and give it to :meth:`load_bucket_plan` in the next run.
        """
        return self._engine.plan()

    def load_bucket_plan(self, plan: Sequence[Sequence[str]]) -> None:
        """Uses a plan that :meth:`bucket_plan` returned, from the next backward on.

        If other parameters than those in the plan get a gradient, buckets are made from sizes.
        Collective: every process calls it, and rank 0's plan counts.

        Raises:
            ValueError: if it names a parameter that the module does not have, or one twice, or puts
                different dtypes or devices into one bucket.
        """
        self._engine.load_plan(plan)

    def _set_static_graph(self) -> None:
        """As ``static_graph=True``; before the first backward, on every process."""
        if not self.static_graph:
            self.static_graph = True
            self._engine.set_static_graph()

    def statistics(self) -> dict[str, int]:
        """Counts since construction: backwards, launches, copies; see apex/parallel/reducer.h."""
        return self._reducer.statistics()

    # --- times ---

    def record_overlap(self, on: bool = True) -> None:
        """Takes the times of synchronized backwards from the next one on, for overlap_report().

        Each process decides for itself. Off, as at first, it costs nothing. On, a clock is read for
        each gradient and a few times for each bucket; on a GPU an event is recorded each time, and
        neither the host nor the stream of backward waits. Not while a CUDA graph is captured. Also
        takes the times at which the host runs forwards with gradients, and steps of optimizers that
        hold parameters of the module.
        Turning it off forgets the last report.

        Waits for what an :class:`OverlappedOptimizer` has left on its way.

        Raises:
            RuntimeError: while a backward is running.
        """
        self._engine.hooks.record_overlap(self._reducer, bool(on))

    def overlap_report(self) -> OverlapReport | None:
        """What the last backward that :meth:`record_overlap` took the times of has hidden.

        ``print(model.overlap_report())`` shows a table with a row per bucket. None if no backward
        was recorded yet. With an :class:`OverlappedOptimizer` it is the last backward whose buckets
        were all waited for. On a GPU the host waits until that backward is through. Not thread
        safe.
        """
        report = self._reducer.overlap_report()
        timeline = self._engine.hooks.timeline
        if report is None or timeline is None:
            return None
        buckets = [BucketOverlap(**bucket) for bucket in report.pop("buckets")]
        began_s = report["began_s"]
        took_s = max([report["backward_s"], *(bucket.arrived_s for bucket in buckets)])
        spans = timeline.of_step(began_s, began_s + took_s)
        rank = dist.get_rank(self.process_group)
        return OverlapReport(**report, rank=rank, buckets=buckets, spans=spans)

    def straggler_report(self) -> StragglerReport:
        """How long each process takes for its part of a step, and which one the others wait for.

        ``print(model.straggler_report())`` shows a table with a row per rank, and, for a rank that
        holds up the others, whether it loses the time before or in backward, and between the
        gradients of which parameters. It is always on, and the same on every rank: the last 256
        synchronized backwards that had a bucket plan, as all but the first. Without ranks where
        none has counted yet; so it is with one process, and on GPUs without
        ``check_reduction=True`` or ``on_failure="skip"``, where ranks do not read each other's
        reports. Does not block.
        """
        report = self._reducer.straggler_report()
        ranks = [RankTimes(**rank) for rank in report.pop("ranks")]
        return StragglerReport(**report, ranks=ranks)

    # --- gradients ---

    def gradient_statistics(self) -> GradientStatistics | None:
        """Norms by process, the gradient noise scale and outliers, of the last measured backward.

        With ``gradient_statistics=True``. The same on every process; that of the last synchronized
        backward that ended without an exception, None if there was none yet. Gradients that were
        reduced apart from the plan, in the step in which a parameter is used for the first time,
        count in ``norm`` only. With loss scaling, norms are those of the scaled loss.

        Raises:
            RuntimeError: without the option.
        """
        self._require_statistics()
        found = self._reducer.gradient_statistics()
        return None if found is None else GradientStatistics(**found)

    def parameter_norms(self) -> list[ParameterNorms]:
        """The same by parameter: of the average, and of this process's own gradient.

        Raises:
            RuntimeError: without ``gradient_statistics=True``.
        """
        self._require_statistics()
        return [ParameterNorms(**one) for one in self._reducer.parameter_norms()]

    def _require_statistics(self) -> None:
        if not self._engine.measures_gradients:
            raise RuntimeError(
                "gradients are not measured: construct with gradient_statistics=True on every "
                "process."
            )

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)``, with its result.

        With ``gradient_statistics=True`` the norm is known on the CPU, and no pass over the
        gradients is made for it, if they are as backward has left them: what has changed them since
        (as unscaling does) is noticed, but for single elements that were changed through ``.data``.
        Else, and without the option, it is torch's function.

        Returns:
            The norm before, [], float32 or the gradients' dtype.

        Raises:
            RuntimeError: with ``error_if_nonfinite``, if the norm is infinite or NaN.
        """
        covered = self._engine.parameters
        return clip(self.module, self._reducer, covered, max_norm, error_if_nonfinite)

    # --- state dicts ---

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As that of ``nn.Module``, for keys with ``module.`` in front, and for keys without.

        Every process has to load the same. Nothing is exchanged here: where replicas are compared
        (``replica_check_every``), the next backward compares all of the state at once.

        Raises:
            RuntimeError: if some of the keys begin with ``module.`` and some do not; or as in
                ``nn.Module``.
        """
        if isinstance(state_dict, Mapping):
            state_dict = _state_dicts.with_prefix(self, state_dict)
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:  # an error may have left some of it loaded
            self._engine.check_replicas_next()

    # --- copies: the engine and the groups belong to the process ---

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_torch_join": None, "_engine": copy.copy(self._engine)}
        state.pop("device_mesh", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        base: Any = super()
        base.__setstate__(state)
        # The first forward in train() connects to the default group; evaluation needs none.
        self._engine.belong_to(self)


# Known to torch as what its Join takes, without the cost of an abstract base class.
torch_join.Joinable.register(DistributedDataParallel)
