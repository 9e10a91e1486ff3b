# SPDX-License-Identifier: BSD-3-Clause
"""The table of NVIDIA Apex's names and their status here. Writes compatibility_apex.md.

Run `python docs/compatibility_apex.py` after changing the table. A test checks the table and
compares the page with it (python/tests/test_compatibility_apex.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_suffix(".md")

SAME = "same"  #: Same arguments, same effect.
DIFFERS = "differs"  #: Exists; the note describes the difference.
REFUSED = "refused"  #: Exists; using it raises an error with advice.
ABSENT = "absent"  #: Does not exist; the note names a replacement, or why none is needed.

MEANING = {
    SAME: "the same arguments and effect",
    DIFFERS: "there, with the difference that the note states",
    REFUSED: "there, and raises an error that says what to do instead",
    ABSENT: "not there; importing or reaching for it is an ImportError or AttributeError",
}


class Row(NamedTuple):
    """One name of the last version of Apex that has these modules."""

    name: str
    became: str
    note: str = ""
    #: Apex's parameters, which this package has in the same order; empty if not a function, or not
    #: compared.
    parameters: str = ""


ADAM = "params lr bias_correction betas eps"
DDP = (
    "module message_size delay_allreduce shared_param allreduce_trigger_params "
    "retain_allreduce_buffers allreduce_always_fp32 num_allreduce_streams allreduce_communicators "
    "gradient_average gradient_predivide_factor gradient_average_split_factor prof"
)
INITIALIZE = (
    "models optimizers enabled opt_level cast_model_type patch_torch_functions "
    "keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses verbosity "
    "min_loss_scale max_loss_scale"
)
SCALE_LOSS = "loss optimizers loss_id model delay_unscale delay_overflow_check"
GRADS = "model_params master_params flat_master"
CASTS_NOTE = "level O1 casts by `torch.autocast` and `apex.amp.patch`"
TYPES_NOTE = "torch's types and `torch.utils._pytree` take its place"
INTERNAL = "inner working of Apex's wrapper"
KERNEL = "`apex.optimizers` has the optimizer"

#: The lists of torch's functions and tensor methods.
LISTS_OF_TORCH = [
    Row("CASTS", DIFFERS, "as `FP16_FUNCS`; what torch promotes itself stays so when removed"),
    Row(
        "FP16_FUNCS",
        DIFFERS,
        "may be changed before `initialize`; holds functions that are younger than Apex",
    ),
    Row("FP32_FUNCS", DIFFERS, "as `FP16_FUNCS`"),
    Row("MODULE", SAME),
    Row("SEQUENCE_CASTS", DIFFERS, "as `CASTS`"),
]

TABLE: dict[str, list[Row]] = {
    "apex": [
        Row("DeprecatedFeatureWarning", SAME, "never emitted here"),
        Row("amp", SAME),
        Row("fp16_utils", SAME),
        Row("multi_tensor_apply", SAME),
        Row("normalization", SAME),
        Row("optimizers", SAME),
        Row("parallel", SAME),
    ],
    "apex.parallel": [
        Row("DistributedDataParallel", DIFFERS, "see [migration](migration.md)", DDP),
        Row("LARC", SAME, "a module, as in Apex; `apex.parallel.LARC.LARC` is the class"),
        Row("ReduceOp", SAME),
        Row("Reducer", SAME, "", "module_or_grads_list"),
        Row(
            "SyncBatchNorm",
            DIFFERS,
            "every combination of options works, see [sync_batch_norm](sync_batch_norm.md)",
            "num_features eps momentum affine track_running_stats process_group channel_last "
            "fuse_relu",
        ),
        Row(
            "convert_syncbn_model",
            DIFFERS,
            "keeps `training`, `requires_grad` and hooks; leaves batch norms with behaviour of "
            "their own, with a warning",
            "module process_group channel_last",
        ),
        Row("create_syncbn_process_group", SAME, "", "group_size"),
    ],
    "apex.parallel.DistributedDataParallel": [
        Row("forward", SAME),
        Row("disable_allreduce", SAME),
        Row("enable_allreduce", SAME),
        Row("allreduce_bucket", ABSENT, INTERNAL),
        Row("allreduce_fallback", ABSENT, INTERNAL),
        Row("allreduce_maybe_retain", ABSENT, INTERNAL),
        Row("comm_ready_buckets", ABSENT, INTERNAL),
        Row("create_hooks", ABSENT, INTERNAL),
        Row("sync_bucket_structure", ABSENT, INTERNAL + "; `bucket_plan()` shows the buckets"),
    ],
    "apex.parallel.LARC": [
        Row(
            "LARC",
            DIFFERS,
            "an optimizer; copies nothing to the host",
            "optimizer trust_coefficient clip eps",
        ),
    ],
    "apex.parallel.distributed": [
        Row("DistributedDataParallel", DIFFERS, "as above", DDP),
        Row("Reducer", SAME, "", "module_or_grads_list"),
        Row("apply_flat_dist_call", SAME, "", "bucket call extra_args"),
        Row("extract_tensors", SAME, "", "maybe_tensor tensor_list"),
        Row("flat_dist_call", SAME, "", "tensors call extra_args"),
        Row("flatten", SAME, "", "bucket"),
        Row("import_flatten_impl", ABSENT, "there is one implementation of `flatten`"),
        Row("split_by_type", SAME, "", "tensors"),
        Row(
            "split_half_float_double",
            DIFFERS,
            "tensors on every device, and bfloat16 as a fourth list",
            "tensors",
        ),
        Row("unflatten", SAME, "", "coalesced bucket"),
    ],
    "apex.parallel.multiproc": [],
    "apex.parallel.optimized_sync_batchnorm": [
        Row("SyncBatchNorm", DIFFERS, "there is one implementation"),
    ],
    "apex.parallel.optimized_sync_batchnorm_kernel": [
        Row("SyncBatchnormFunction", ABSENT, "`torch.ops.apex` has the operators"),
    ],
    "apex.parallel.sync_batchnorm": [
        Row("SyncBatchNorm", DIFFERS, "there is one implementation"),
    ],
    "apex.parallel.sync_batchnorm_kernel": [
        Row("SyncBatchnormFunction", ABSENT, "`torch.ops.apex` has the operators"),
    ],
    "apex.amp": [
        Row("_amp_state", SAME),
        Row("disable_casts", SAME),
        Row("float_function", SAME, "", "fn"),
        Row("half_function", SAME, "", "fn"),
        Row(
            "init",
            DIFFERS,
            "turns on the casts of O1; `wrap_optimizer` of what it returns is refused",
            "enabled loss_scale enable_caching verbose allow_banned",
        ),
        Row("initialize", DIFFERS, "see [amp](amp.md#different-and-why)", INITIALIZE),
        Row("load_state_dict", SAME, "", "state_dict"),
        Row("master_params", SAME, "", "optimizer"),
        Row("promote_function", SAME, "", "fn"),
        Row("register_float_function", SAME, "", "module name"),
        Row("register_half_function", SAME, "", "module name"),
        Row("register_promote_function", SAME, "", "module name"),
        Row("scale_loss", DIFFERS, "see [amp](amp.md#different-and-why)", SCALE_LOSS),
        Row("state_dict", SAME, "", "destination"),
    ],
    "apex.amp._amp_state": [
        Row("AmpState", SAME),
        Row("_amp_state", SAME),
        Row("master_params", SAME, "", "optimizer"),
        Row("maybe_print", DIFFERS, "`rank0` is True by default"),
        Row("warn_or_err", SAME),
    ],
    "apex.amp.amp": [
        Row("init", DIFFERS, "as above"),
        Row("float_function", SAME, "", "fn"),
        Row("half_function", SAME, "", "fn"),
        Row("promote_function", SAME, "", "fn"),
        Row("register_float_function", SAME, "", "module name"),
        Row("register_half_function", SAME, "", "module name"),
        Row("register_promote_function", SAME, "", "module name"),
    ],
    "apex.amp.compat": [
        Row("filter_attrs", SAME, "", "module attrs"),
        Row("is_floating_point", SAME, "", "x"),
        Row("is_tensor_like", SAME, "", "x"),
        Row("scalar_python_val", SAME, "", "x"),
        Row("tensor_is_float_tensor", SAME),
        Row("tensor_is_variable", SAME),
        Row("variable_is_tensor", SAME),
    ],
    "apex.amp.frontend": [
        Row("O0", DIFFERS, "a function that returns the level; call it, as the class"),
        Row("O1", DIFFERS, "as `O0`"),
        Row("O2", DIFFERS, "as `O0`"),
        Row("O3", DIFFERS, "as `O0`"),
        Row("Properties", SAME),
        Row("initialize", DIFFERS, "as above", INITIALIZE),
        Row("load_state_dict", SAME, "", "state_dict"),
        Row("opt_levels", DIFFERS, "also has the levels with bfloat16"),
        Row("state_dict", SAME, "", "destination"),
    ],
    "apex.amp.handle": [
        Row("AmpHandle", DIFFERS, "made by `amp.init()`; other constructor arguments"),
        Row("NoOpHandle", DIFFERS, "`wrap_optimizer()` raises, with advice"),
        Row("disable_casts", SAME),
        Row("scale_loss", DIFFERS, "as above", SCALE_LOSS),
    ],
    "apex.amp.handle.AmpHandle": [
        Row("cache", SAME),
        Row("has_cache", SAME),
        Row("is_active", SAME),
        Row("remove_cache", SAME, "", "self param"),
        Row("scale_loss", REFUSED, "as in Apex: use `amp.scale_loss`", "self loss optimizer"),
        Row("wrap_optimizer", REFUSED, "use `amp.initialize`", "self optimizer num_loss"),
    ],
    "apex.amp.lists.functional_overrides": [
        Row("BANNED_FUNCS", SAME, "may be changed before `initialize`"),
        Row(
            "FP16_FUNCS",
            DIFFERS,
            "may be changed before `initialize`; holds functions that are younger than Apex",
        ),
        Row("FP32_FUNCS", DIFFERS, "as `FP16_FUNCS`"),
        Row("MODULE", SAME),
    ],
    "apex.amp.lists.tensor_overrides": LISTS_OF_TORCH,
    "apex.amp.lists.torch_overrides": LISTS_OF_TORCH,
    "apex.amp.opt": [
        Row("OptimWrapper", ABSENT, "use `amp.initialize` and `amp.scale_loss`"),
    ],
    "apex.amp.rnn_compat": [
        Row("RNN_NAMES", SAME),
        Row("VariableFunctionsShim", SAME),
        Row("has_old_rnns", SAME),
        Row(
            "whitelist_rnn_cells", DIFFERS, "no effect: O1 casts recurrent cells", "handle verbose"
        ),
    ],
    "apex.amp.scaler": [
        Row(
            "LossScaler",
            SAME,
            "",
            "loss_scale init_scale scale_factor scale_window min_loss_scale max_loss_scale",
        ),
        Row("axpby_check_overflow_python", ABSENT, "use `amp_C.multi_tensor_axpby`"),
        Row("scale_check_overflow_python", ABSENT, "use `amp_C.multi_tensor_scale`"),
    ],
    "apex.amp.scaler.LossScaler": [
        Row("_has_overflow", SAME, "read and written"),
        Row("_loss_scale", SAME, "read and written"),
        Row("_max_loss_scale", SAME, "read and written"),
        Row("_min_loss_scale", SAME, "read and written"),
        Row("_overflow_buf", SAME, "read and replaced"),
        Row("_scale_seq_len", SAME, "read and written"),
        Row("_unskipped", SAME, "read and written"),
        Row("clear_overflow_state", SAME),
        Row("loss_scale", SAME),
        Row(
            "unscale",
            SAME,
            "",
            "self model_grads master_grads unused_scale models_are_masters scale_override",
        ),
        Row("unscale_python", ABSENT, "use `unscale`"),
        Row(
            "unscale_with_stashed",
            SAME,
            "",
            "self model_grads stashed_master_grads master_grads scale_override",
        ),
        Row("unscale_with_stashed_python", ABSENT, "use `unscale_with_stashed`"),
        Row("update_scale", SAME),
    ],
    "apex.amp.utils": [
        Row("as_inplace", ABSENT, CASTS_NOTE),
        Row("cached_cast", ABSENT, CASTS_NOTE),
        Row("casted_args", ABSENT, CASTS_NOTE),
        Row("collect_fp_tensor_types", ABSENT, TYPES_NOTE),
        Row("get_cuda_version", ABSENT, "use `torch.version.cuda`"),
        Row("get_func", ABSENT, CASTS_NOTE),
        Row("has_func", ABSENT, CASTS_NOTE),
        Row("is_cuda_enabled", ABSENT, "use `torch.version.cuda is not None`"),
        Row("is_fp_tensor", ABSENT, "use `torch.is_floating_point`"),
        Row("is_nested", ABSENT, TYPES_NOTE),
        Row("maybe_float", ABSENT, TYPES_NOTE),
        Row("maybe_half", ABSENT, TYPES_NOTE),
        Row("set_func", ABSENT, CASTS_NOTE),
        Row("set_func_save", ABSENT, CASTS_NOTE),
        Row("should_cache", ABSENT, CASTS_NOTE),
        Row("synthesize_flattened_rnn_weights", ABSENT, CASTS_NOTE),
        Row("type_string", ABSENT, "use `tensor.dtype`"),
        Row("verbosify", ABSENT, CASTS_NOTE),
    ],
    "apex.amp.wrap": [
        Row("cached_cast", ABSENT, CASTS_NOTE),
        Row("disable_casts", ABSENT, "use `amp.disable_casts`"),
        Row("err_if_any_half", ABSENT, CASTS_NOTE),
        Row("err_if_arg0_half", ABSENT, CASTS_NOTE),
        Row("make_cast_wrapper", ABSENT, "use `amp.half_function` and its siblings"),
        Row("make_promote_wrapper", ABSENT, "use `amp.promote_function`"),
        Row("new_rnn_cast", ABSENT, CASTS_NOTE),
        Row("promote", ABSENT, "use `amp.register_promote_function`"),
        Row("promote_match_arg0", ABSENT, CASTS_NOTE),
        Row("rnn_cast", ABSENT, CASTS_NOTE),
        Row("sequence_promote", ABSENT, CASTS_NOTE),
    ],
    "apex.fp16_utils": [
        Row("BN_convert_float", SAME, "", "module"),
        Row("DynamicLossScaler", SAME, "", "init_scale scale_factor scale_window"),
        Row("FP16Model", SAME, "", "network"),
        Row(
            "FP16_Optimizer",
            DIFFERS,
            "`state_dict()` loads with `weights_only=True`; ranks decide together about skipping",
            "init_optimizer static_loss_scale dynamic_loss_scale dynamic_loss_args verbose",
        ),
        Row("LossScaler", SAME, "", "scale"),
        Row("clip_grad_norm", SAME),
        Row("convert_module", SAME, "", "module dtype"),
        Row("convert_network", SAME, "", "network dtype"),
        Row("master_params_to_model_params", SAME, "", GRADS),
        Row("model_grads_to_master_grads", SAME, "", GRADS),
        Row("network_to_half", SAME, "", "network"),
        Row("prep_param_lists", DIFFERS, "`flat_master` takes mixed types", "model flat_master"),
        Row("to_python_float", SAME, "", "t"),
        Row("tofp16", SAME),
    ],
    "apex.optimizers": [
        Row("FusedAdagrad", SAME, "", "params lr eps weight_decay set_grad_none adagrad_w_mode"),
        Row(
            "FusedAdam",
            DIFFERS,
            "torch's fused Adam; `amsgrad` is a ValueError, and the early `max_grad_norm` a "
            "TypeError with advice",
            ADAM + " adam_w_mode weight_decay amsgrad set_grad_none capturable master_weights",
        ),
        Row(
            "FusedLAMB",
            DIFFERS,
            "also bfloat16 and float64; state of float16 parameters is float32; `max_grad_norm` of "
            "None or 0 does not clip",
            ADAM + " weight_decay amsgrad adam_w_mode grad_averaging set_grad_none max_grad_norm "
            "use_nvlamb",
        ),
        Row("FusedMixedPrecisionLamb", ABSENT, "use `FusedLAMB` with amp's level O2"),
        Row(
            "FusedNovoGrad",
            DIFFERS,
            "also bfloat16 and float64; state of float16 parameters is float32; parameters may "
            "get their first gradient late; norms are saved with the parameters (states of Apex "
            "load)",
            ADAM + " weight_decay amsgrad reg_inside_moment grad_averaging norm_type init_zero "
            "set_grad_none",
        ),
        Row(
            "FusedSGD",
            DIFFERS,
            "torch's fused SGD; `wd_after_momentum` is refused",
            "params lr momentum dampening weight_decay nesterov wd_after_momentum "
            "materialize_master_grads set_grad_none",
        ),
        Row("FP16_Optimizer", ABSENT, "of early versions: use `apex.fp16_utils.FP16_Optimizer`"),
    ],
    "apex.contrib.optimizers": [
        Row("FP16_Optimizer", ABSENT, "use `apex.fp16_utils.FP16_Optimizer`"),
        Row("FusedAdam", DIFFERS, "that of `apex.optimizers`"),
        Row("FusedLAMB", DIFFERS, "that of `apex.optimizers`"),
        Row("FusedSGD", DIFFERS, "that of `apex.optimizers`"),
    ],
    "apex.normalization": [
        Row("FusedLayerNorm", SAME, "", "normalized_shape eps elementwise_affine memory_efficient"),
        Row("FusedRMSNorm", SAME, "", "normalized_shape eps elementwise_affine memory_efficient"),
        Row("MixedFusedLayerNorm", SAME, "", "normalized_shape eps"),
        Row("MixedFusedRMSNorm", SAME, "", "normalized_shape eps"),
        Row("InstanceNorm3dNVFuser", ABSENT, "use `torch.nn.InstanceNorm3d`"),
    ],
    "apex.normalization.fused_layer_norm": [
        Row("FusedLayerNorm", SAME),
        Row("FusedLayerNormAffineFunction", DIFFERS, "has `apply`, and is no autograd function"),
        Row("FusedLayerNormAffineMixedDtypesFunction", DIFFERS, "has `apply` only"),
        Row("FusedLayerNormFunction", DIFFERS, "has `apply` only"),
        Row("FusedRMSNorm", SAME),
        Row("FusedRMSNormAffineFunction", DIFFERS, "has `apply` only"),
        Row("FusedRMSNormAffineMixedDtypesFunction", DIFFERS, "has `apply` only"),
        Row("FusedRMSNormFunction", DIFFERS, "has `apply` only"),
        Row("MixedFusedLayerNorm", SAME),
        Row("MixedFusedRMSNorm", SAME),
        Row("fused_layer_norm", SAME, "", "input normalized_shape eps memory_efficient"),
        Row(
            "fused_layer_norm_affine",
            DIFFERS,
            "weight and bias may have another type than the input",
            "input weight bias normalized_shape eps memory_efficient",
        ),
        Row("fused_rms_norm", SAME, "", "input normalized_shape eps memory_efficient"),
        Row(
            "fused_rms_norm_affine",
            DIFFERS,
            "the weight may have another type than the input",
            "input weight normalized_shape eps memory_efficient",
        ),
        Row("manual_rms_norm", SAME, "", "input normalized_shape weight eps"),
        Row(
            "mixed_dtype_fused_layer_norm_affine",
            SAME,
            "",
            "input weight bias normalized_shape eps memory_efficient",
        ),
        Row(
            "mixed_dtype_fused_rms_norm_affine",
            SAME,
            "",
            "input weight normalized_shape eps memory_efficient",
        ),
    ],
    "apex.multi_tensor_apply": [
        Row("MultiTensorApply", DIFFERS, "`available` is False", "chunk_size"),
        Row("multi_tensor_applier", DIFFERS, "as `MultiTensorApply`"),
    ],
    "amp_C": [
        Row("multi_tensor_adagrad", ABSENT, KERNEL),
        Row("multi_tensor_adam", ABSENT, KERNEL),
        Row("multi_tensor_adam_capturable", ABSENT, KERNEL),
        Row("multi_tensor_adam_capturable_master", ABSENT, KERNEL),
        Row("multi_tensor_axpby", SAME),
        Row(
            "multi_tensor_l2norm",
            DIFFERS,
            "on every device; tensors of several types; an empty list has norm 0",
        ),
        Row("multi_tensor_l2norm_mp", ABSENT, "use `multi_tensor_l2norm`"),
        Row(
            "multi_tensor_l2norm_scale",
            ABSENT,
            "use `multi_tensor_scale` and `multi_tensor_l2norm`",
        ),
        Row("multi_tensor_lamb", ABSENT, KERNEL),
        Row("multi_tensor_lamb_mp", ABSENT, KERNEL),
        Row("multi_tensor_lamb_stage1_cuda", ABSENT, KERNEL),
        Row("multi_tensor_lamb_stage2_cuda", ABSENT, KERNEL),
        Row("multi_tensor_lars", ABSENT, "use `LARC` with `clip=False`"),
        Row("multi_tensor_novograd", ABSENT, KERNEL),
        Row("multi_tensor_scale", SAME),
        Row("multi_tensor_sgd", ABSENT, KERNEL),
        Row("multi_tensor_unscale_l2norm", SAME),
        Row("update_scale_hysteresis", ABSENT, "use `amp.scale_loss`"),
    ],
    "apex_C": [
        Row("flatten", SAME),
        Row("unflatten", SAME),
    ],
}

INTRODUCTION = """# Every name of NVIDIA's Apex, and what became of it

The public names of the last version of Apex that had `apex.parallel`, `apex.amp` and
`apex.fp16_utils`, with those of `apex.optimizers`, `apex.normalization`, `apex.multi_tensor_apply`
and the extension modules `amp_C` and `apex_C`. What differs in behaviour is in
[migration.md](migration.md) and [amp.md](amp.md). This page is written by
`docs/compatibility_apex.py`; a test walks its table.
"""


def render() -> str:
    """The text of the page."""
    parts = [INTRODUCTION]
    parts.append("\n".join(f"- **{word}**: {meaning}." for word, meaning in MEANING.items()) + "\n")
    for module, rows in TABLE.items():
        parts.append(f"## `{module}`\n")
        if not rows:
            parts.append(
                "Runs as `python -m`; see [migration.md](migration.md). What rank N prints is in\n"
                "`rank_N.log`, not in `GPU_N.log`.\n"
            )
            continue
        lines = ["| name | | note |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {row.became} | {row.note} |" for row in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
