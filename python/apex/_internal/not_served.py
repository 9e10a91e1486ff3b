# SPDX-License-Identifier: BSD-3-Clause
"""Names and options of Apex or torch that this package does not serve, and what to use instead.

``docs/compatibility.md`` shows the same table. A combination of features is refused here too, not
by a module that connects them.
"""

from __future__ import annotations

from typing import Any, NoReturn

_FP16_OPTIMIZER = (
    "use apex.fp16_utils.FP16_Optimizer, which wraps any optimizer, or amp.initialize(model, "
    'optimizer, opt_level="O2")'
)
_LAMB = 'use FusedLAMB with amp.initialize(model, optimizer, opt_level="O2")'
_OLD_HANDLE = (
    'replace amp.init() by model, optimizer = amp.initialize(model, optimizer, opt_level="O1"), '
    "and use amp.scale_loss(loss, optimizer)"
)
#: Methods that Apex's wrapper calls and this one does not.
METHODS_OF_APEX = (
    "allreduce_bucket",
    "allreduce_fallback",
    "allreduce_maybe_retain",
    "comm_ready_buckets",
    "create_hooks",
    "sync_bucket_structure",
)
COMMUNICATORS = "num_allreduce_streams > 1 with a process_group over another backend than Gloo"
INSTEAD = {
    "DistributedDataParallel(mixed_precision=...)": (
        "use torch.autocast, and register_builtin_comm_hook('bf16') for the communication"
    ),
    "DistributedDataParallel(shared_param=...)": (
        "remove the argument, because a parameter used in several places needs no option"
    ),
    COMMUNICATORS: "pass the process groups in allreduce_communicators",
    "DistributedDataParallel._register_buffer_comm_hook": (
        "use broadcast_buffers=True, or reduce module.buffers() with torch.distributed after "
        "backward, on every rank"
    ),
    "DistributedDataParallel.join() with master weights or a dynamic scale of amp": (
        "use torch.autocast, or level O1-bf16, which needs neither"
    ),
    **{
        f"a subclass of DistributedDataParallel with {name}()": (
            "the engine does not call it, so use register_comm_hook() to change how gradients are "
            "communicated, and rename the method if it is the script's own"
        )
        for name in METHODS_OF_APEX
    },
    "DistributedDataParallel.join() with SyncBatchNorm": (
        "use BatchNorm, or the same number of batches on every rank"
    ),
    "DistributedDataParallel.join() with gradients kept between synchronized backwards": (
        "clear gradients (zero_grad), or accumulate under no_sync()"
    ),
    "a backward that reaches a wrapper's parameters in a reentrant checkpoint before an output": (
        "call the wrapper, not its module, return from its forward what the loss uses, or pass "
        "use_reentrant=False"
    ),
    "torch.distributed.algorithms.join.Join([DistributedDataParallel])": (
        "use `with model.join():` around the loop"
    ),
    "torch.func.functional_call(DistributedDataParallel, ...)": (
        "call it on model.module, whose gradients are averaged as well"
    ),
    "amp.init().wrap_optimizer": _OLD_HANDLE,
    "amp.init().scale_loss": _OLD_HANDLE,
    "apex.optimizers.FP16_Optimizer": _FP16_OPTIMIZER,
    "apex.optimizers.fp16_optimizer": _FP16_OPTIMIZER,
    "apex.optimizers.FusedMixedPrecisionLamb": _LAMB,
    "apex.contrib.optimizers.FP16_Optimizer": _FP16_OPTIMIZER,
    "apex.contrib.optimizers.fp16_optimizer": _FP16_OPTIMIZER,
    "apex.contrib.clip_grad": "use torch.nn.utils.clip_grad_norm_",
    "apex.contrib.sparsity": "use torch.ao.pruning or torch.sparse.to_sparse_semi_structured",
    "apex.contrib.xentropy": "use torch.nn.functional.cross_entropy with label_smoothing",
    "apex.contrib.multihead_attn": "use torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.groupbn": "use apex.parallel.SyncBatchNorm with channel_last=True",
    "apex.RNN": "use torch.nn.LSTM, GRU or RNN",
    "apex.reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
    "apex.mlp": "use torch.nn.Sequential of Linear layers with torch.compile",
    "apex.fused_dense": "use torch.nn.Linear with torch.compile",
    "apex.pyprof": "use torch.profiler",
    "apex.transformer": "use Megatron-LM, or tensor parallelism of torch.distributed.tensor",
    "amp_C.multi_tensor_sgd": "use apex.optimizers.FusedSGD",
    "amp_C.multi_tensor_adam": "use apex.optimizers.FusedAdam",
    "amp_C.multi_tensor_adam_capturable": "use apex.optimizers.FusedAdam(capturable=True)",
    "amp_C.multi_tensor_adam_capturable_master": "use apex.optimizers.FusedAdam with amp's O2",
    "amp_C.multi_tensor_adagrad": "use apex.optimizers.FusedAdagrad",
    "amp_C.multi_tensor_novograd": "use apex.optimizers.FusedNovoGrad",
    "amp_C.multi_tensor_lamb": "use apex.optimizers.FusedLAMB",
    "amp_C.multi_tensor_lamb_mp": "use apex.optimizers.FusedLAMB with amp's O2",
    "amp_C.multi_tensor_lamb_stage1_cuda": "use apex.optimizers.FusedLAMB",
    "amp_C.multi_tensor_lamb_stage2_cuda": "use apex.optimizers.FusedLAMB",
    "amp_C.multi_tensor_lars": "use apex.parallel.LARC.LARC(torch.optim.SGD(...), clip=False)",
    "amp_C.multi_tensor_l2norm_mp": "use amp_C.multi_tensor_l2norm",
    "amp_C.multi_tensor_l2norm_scale": "use amp_C.multi_tensor_scale, then multi_tensor_l2norm",
    "amp_C.update_scale_hysteresis": "use torch.amp.GradScaler, or amp.scale_loss",
}


def refuse(name: str, kind: type[Exception] = NotImplementedError) -> NoReturn:
    """Raise the error for `name`, a key of INSTEAD."""
    raise kind(f"{name} is not supported: {INSTEAD[name]}.")


class Finder:
    """The last entry of ``sys.meta_path``: raises ImportError for a name of the table.

    ``from package import name`` also searches for a module of that name.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name in INSTEAD:
            refuse(name, ImportError)
