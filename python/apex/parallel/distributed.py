"""DistributedDataParallel and Reducer, the Python side of the gradient reducer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apex._flat import flatten, unflatten
from apex.parallel import _compile, _in_backward, _options
from apex.parallel._ddp_hooks import BucketHooks, ReducedBucket
from apex.parallel._ddp_join import UnevenInputs
from apex.parallel._ddp_overlap import OverlapTimes
from apex.parallel._ddp_plan import BucketPlan
from apex.parallel._mixed_precision import Casts, MixedPrecision
from apex.parallel._reducer import Reducer, flat_dist_call
from apex.parallel._tensor_lists import (
    apply_flat_dist_call,
    extract_tensors,
    split_by_type,
    split_half_float_double,
)
from apex.parallel._torch_names import IGNORED, TorchNames
from apex.parallel._tree import find_tensors
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


class DistributedDataParallel(OverlapTimes, BucketHooks, UnevenInputs, BucketPlan, TorchNames):
    r"""Averages the gradients of a module over the processes of a group, during backward.

    Each process holds the whole module and works on its own part of the batch. At construction the
    processes check that they hold the same model and take rank 0's parameters, frozen ones
    included. During backward, gradients are put into buckets and each bucket is all-reduced as soon
    as it is complete, while the rest of backward is still running; when ``backward()`` returns,
    every ``.grad`` holds the average over all processes. The first backward (and the first after
    parameters were frozen, unfrozen, added or replaced) learns the order in which gradients arrive
    and communicates at its end.

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
        gradient_average: divide the sum by the number of processes. If False, gradients must be
            cleared between two synchronized backwards.
        gradient_predivide_factor: multiply by 1/f before the sum and by f/world_size after it.
        gradient_average_split_factor: ignored, as in Apex.
        prof: emit a profiler range around the forward of the wrapper.
        device_ids: ``[device]`` of this process: inputs are moved there. Ignored for a module on
            the CPU.
        output_device: move outputs there.
        dim: no effect (a process drives one device).
        broadcast_buffers: take rank 0's buffers at construction and before each training forward.
            Default False, as in Apex; ``torch``'s class has True.
        init_sync: take rank 0's parameters at construction.
        process_group: the processes that take part; default all.
        bucket_cap_mb: bucket size in MiB, instead of ``message_size``; the first bucket is then at
            most 1 MiB, as in ``torch``.
        find_unused_parameters: no effect (not needed).
        check_reduction: after each backward, raise on every process if they are out of step: if
            some have left out a backward, run one more or one without synchronization, so that
            gradients of different steps were averaged. None, the default, is True where that costs
            nothing, for parameters on the CPU; on other devices the host waits for it.
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
        bucket_cap_mb_list: its largest number takes the place of ``bucket_cap_mb``; for sizes that
            differ by bucket there is :meth:`load_bucket_plan`.
        batched_grad_copy: no effect (gradients are copied by multi-tensor operations).
        lazy_bucket_allocation: no effect (buckets are allocated in the first backward).
        check_finite: raise on every process after a backward to which a process contributed an
            infinity or a NaN, naming the first process and parameter. Costs a read of the
            gradients, a small all-gather, and a wait of the host.

        registered_buffers: take the buckets' memory from the backend where it has some of its own.
            With NCCL it is registered with the communicator, which may then reduce without copying.
            Elsewhere a warning is logged once, and torch's memory is used.

    Raises:
        RuntimeError: if there is no process group, the processes hold different models, or an
            optimizer steps parameters inside backward.
        ValueError: for arguments that contradict each other.

    Construction, forward and backward are collective: every process of the group has to take part.
    Construction blocks until all processes have come. Not thread safe.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int | str = _options.MESSAGE_SIZE,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Iterable[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
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
    ) -> None:
        super().__init__()
        if isinstance(message_size, (list, tuple)) and device_ids is None:
            # DistributedDataParallel(module, [device]), as torch's class is called.
            message_size, device_ids = _options.MESSAGE_SIZE, message_size
        if bucket_cap_mb_list:
            bucket_cap_mb = max(bucket_cap_mb_list)
        message_size = _options.positive_message_size(message_size)
        _options.check_exclusive(
            message_size=message_size,
            bucket_cap_mb=bucket_cap_mb,
            delay_allreduce=delay_allreduce,
            shared_param=shared_param,
            allreduce_trigger_params=allreduce_trigger_params,
            num_allreduce_streams=num_allreduce_streams,
            allreduce_communicators=allreduce_communicators,
            process_group=process_group,
            device_mesh=device_mesh,
            gradient_predivide_factor=gradient_predivide_factor,
        )
        _options.warn_ignored(gradient_average_split_factor)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            process_group = device_mesh.get_group()

        self.module = module
        self.parameters_to_ignore = set(getattr(module, IGNORED, ()))
        self.message_size = message_size
        self.bucket_cap_mb = bucket_cap_mb
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view or retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.num_allreduce_streams = num_allreduce_streams
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = float(gradient_predivide_factor)
        self.prof = prof
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers or bool(forward_sync_buffers)
        self.init_sync = init_sync
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.check_finite = check_finite
        self.check_reduction = check_reduction
        self.registered_buffers = registered_buffers
        self._trigger_names = _options.trigger_names(allreduce_trigger_params, module)
        self._comm_hook = None
        self._bucket_callback = None
        self._join = None
        self._torch_join = None
        self._overlap = None
        self._mixed_precision = None if mixed_precision is None else MixedPrecision(mixed_precision)
        self._splits_graphs = False
        self._reducer = None
        parameters = [parameter for _, parameter in self._named_parameters()]
        self._input_device, self._output_device = _options.single_device(
            device_ids, output_device, parameters
        )
        self.device_ids = list(device_ids) if device_ids else None
        self.output_device = self._output_device
        if not any(parameter.requires_grad for parameter in parameters):
            warnings.warn(
                "DistributedDataParallel wraps a module without a parameter that requires a "
                "gradient: forward passes through and nothing is synchronized.",
                stacklevel=2,
            )
        self._connect(process_group, allreduce_communicators, init_sync)
        name_layers(module, self.process_group)
        if self._mixed_precision is not None and self._mixed_precision.wire is not None:
            self._set_comm_hook(self._mixed_precision.wire)
        self._refuse_steps_in_backward()

    def _refuse_steps_in_backward(self) -> None:
        # After what is collective, so that no rank waits for one that raises.
        _in_backward.refuse(self.module, self.process_group, self.parameters_to_ignore)
        self._stepped_in_backward = _in_backward.parameters_known()

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
        with torch.profiler.record_function(name) if self.prof else _NO_RANGE:
            inputs, kwargs, casts = enter(inputs, kwargs, training)
            outer = _compile.registry._active_ddp_module
            if training and self._splits_graphs:
                # Note [Compiled graphs are split by bucket] in _compile.py.
                _compile.registry._active_ddp_module = self
            try:
                output = self._call_module(inputs, kwargs)
            except BaseException:
                if casts is not None:
                    self._mixed_precision.abandon(casts)
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
        if casts is not None:
            self._mixed_precision.leave(self.module, casts, output, training)
        if self._output_device is not None:
            output = _options.move(output, self._output_device)
        if training and output is not None:
            outputs = output if isinstance(output, torch.Tensor) else find_tensors(output)
            if self._reducer is None:
                self._refuse_backward([output] if outputs is output else outputs)
            else:
                self._reducer.watch_outputs(outputs)
        return output

    # The engine cannot be traced. While torch.compile traces this class, the graph is broken before
    # and after the module; of what runs then, the compiler begins with the frame of _call_module().
    # Calling these imports torch._dynamo, which takes a second, so nothing else does.
    _forward_untraced = torch._disable_dynamo(_forward, recursive=False)
    _enter_untraced = torch._disable_dynamo(_enter)
    _leave_untraced = torch._disable_dynamo(_leave)

    def _prepare(self) -> None:
        if self._reducer is None:
            if not self.training:
                return  # some ranks may evaluate alone; see _refuse_backward()
            self._connect_copy()
        elif self._module_changed():
            if self._join is not None:
                raise RuntimeError("parameters were added, removed or replaced under join().")
            self._build_reducer(init_sync=True)
        if self._stepped_in_backward != _in_backward.parameters_known():
            self._refuse_steps_in_backward()
        self._reducer.prepare_for_forward(self.training)
        buffers = (
            self.broadcast_buffers
            and self.training
            and self.require_forward_param_sync
            and self._reducer.synchronizing
        )
        root = 0 if self._join is None else self._join.announce_forward(buffers)
        if buffers:
            self._sync_buffers(root)
