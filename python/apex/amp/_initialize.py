# SPDX-License-Identifier: BSD-3-Clause
"""The implementation of :func:`apex.amp.initialize`: checks, casts, optimizers, scalers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._internal.dtypes import LOW_PRECISION_DTYPES, convert_modules, is_low_precision
from .._internal.refused import DataParallelWrapper, KeepsMasterWeights
from .._internal.tree import map_tensors
from ._amp_state import _amp_state, warn_or_err
from ._process_optimizer import process_optimizer, refuse_master_weights
from .casting import disable_casts, init
from .optimizer import float32_value, refuse_sharded
from .scaler import LossScaler

if TYPE_CHECKING:
    from .frontend import Properties


def cast_values(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in `value` to `dtype`.

    Handles containers of any class (see ``map_tensors``) and objects with a ``to`` method. Strings,
    numbers, arrays and integer tensors are returned unchanged.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def move(leaf: Any) -> Any:
        movable = hasattr(leaf, "to") and not isinstance(leaf, torch.nn.Module)
        return leaf.to(dtype) if movable else leaf

    return map_tensors(value, cast, move)


class CastForward:
    """A replacement of ``model.forward`` that casts floating-point inputs and outputs.

    Inside such a model, the casts of level O1, which another model may use, are off. This is an
    object and not a closure, so that a copied or unpickled model runs its own parameters.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        o1: bool,
    ) -> None:
        self.old_forward = forward
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        self.o1 = o1
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_dtype is not None:
            args = tuple(cast_values(arg, self.input_dtype) for arg in args)
            kwargs = {key: cast_values(value, self.input_dtype) for key, value in kwargs.items()}
        if self.o1 or _amp_state.handle is None or not _amp_state.handle.is_active():
            output = self.old_forward(*args, **kwargs)
        else:
            with disable_casts():
                output = self.old_forward(*args, **kwargs)
        if self.output_dtype is None:
            return output
        return cast_values(output, self.output_dtype)


_TORCH_DDP = torch.nn.parallel.DistributedDataParallel


def _check_models(models: list[torch.nn.Module]) -> None:
    for model in models:
        if isinstance(model, (_TORCH_DDP, torch.nn.DataParallel, DataParallelWrapper)):
            raise RuntimeError(
                f"amp.initialize was given a {type(model).__name__}; initialize the bare model "
                "first and wrap what initialize returns."
            )
        if _amp_state.allow_incoming_model_not_fp32:
            continue
        for kind, named in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in named:
                if is_low_precision(tensor):
                    warn_or_err(
                        f"Found {kind} {name} with type {tensor.dtype} in a model given to "
                        "amp.initialize, which expects float32 and does the casts itself: remove "
                        ".half() or .bfloat16() from the model."
                    )


def _check_castable(models: list[torch.nn.Module]) -> None:
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise RuntimeError(
                    f"amp.initialize cannot cast the scripted module {name or 'itself'!r}, whose "
                    "state_dict() cannot be made float32: script after initialize, or use level O1."
                )
        for name, parameter in model.named_parameters():
            refuse_sharded(f"the parameter {name!r}", parameter)


def _check_optimizers(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, KeepsMasterWeights):
            raise RuntimeError(
                "amp.initialize was given an FP16_Optimizer; pass the optimizer that it wraps, "
                "because amp keeps its own master weights."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"amp.initialize takes torch optimizers, not {type(optimizer).__name__}."
            )
    again = any(hasattr(optimizer, "_amp_stash") for optimizer in optimizers)
    if again or len(set(map(id, optimizers))) != len(optimizers):
        raise RuntimeError(
            "An optimizer was passed to amp.initialize twice; pass each optimizer once."
        )


def _save_float32(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """A state-dict hook that makes the state of one module float32."""
    for named in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        for name, tensor in named:
            saved = state.get(prefix + name)
            # With keep_vars=True the caller requests the parameter itself.
            if isinstance(saved, torch.Tensor) and saved is not tensor and is_low_precision(saved):
                state[prefix + name] = float32_value(tensor)


def _refuse_assign(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any, *_: Any
) -> None:
    """Refuse ``load_state_dict(assign=True)`` of float32 values before anything is assigned."""
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in module.named_parameters():
        loaded = state.get(prefix + name)
        if not isinstance(loaded, torch.Tensor) or not is_low_precision(parameter):
            continue
        if loaded.dtype != parameter.dtype:
            raise RuntimeError(
                f"load_state_dict(assign=True) would replace {prefix + name}, which amp has cast "
                f"to {parameter.dtype}, by a {loaded.dtype} parameter: load without assign=True, "
                "or before amp.initialize."
            )


def _cast_model(model: torch.nn.Module, properties: Properties) -> None:
    dtype = properties.cast_model_type
    convert_modules(model, dtype, keep_batchnorm=bool(properties.keep_batchnorm_fp32))
    output_dtype = properties.cast_model_outputs or torch.float32
    o1 = bool(properties.patch_torch_functions)
    model.forward = CastForward(model.forward, dtype, output_dtype, o1)
    for module in model.modules() if dtype in LOW_PRECISION_DTYPES else ():
        module.register_state_dict_post_hook(_save_float32)
        module.register_load_state_dict_pre_hook(_refuse_assign)


def _recast_state(optimizer: torch.optim.Optimizer) -> None:
    """Cast the state of `optimizer` to the current dtypes of its parameters."""
    if getattr(optimizer, "state", None):  # a wrapper may have no state
        optimizer.load_state_dict(optimizer.state_dict())


def _device_types(models: list[torch.nn.Module]) -> set[str]:
    """Device types that level O1 casts: every accelerator, and the CPU only if models are on it."""
    kinds = {param.device.type for model in models for param in model.parameters()} - {"meta"}
    return kinds | {"cuda"} if torch.cuda.is_available() else kinds


def _cast_models(
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    properties: Properties,
) -> None:
    if properties.cast_model_type:
        for model in models:
            _cast_model(model, properties)
        # With master weights, the state stays float32 and moves to them.
        for optimizer in optimizers if not properties.master_weights else ():
            _recast_state(optimizer)
    elif properties.cast_model_outputs:
        for model in models:
            model.forward = CastForward(model.forward, None, properties.cast_model_outputs, True)


def setup(
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    properties: Properties,
    num_losses: int,
    overflow_group: Any = None,
) -> None:
    """Apply `properties` to `models` and `optimizers`, in place."""
    # All checks come before the first change.
    _check_models(models)
    _check_optimizers(optimizers)
    for optimizer in optimizers:
        if properties.master_weights:
            refuse_master_weights(optimizer)
    if properties.cast_model_type in LOW_PRECISION_DTYPES:
        _check_castable(models)
    loss_scalers = [
        LossScaler(
            properties.loss_scale,
            min_loss_scale=_amp_state.min_loss_scale,
            max_loss_scale=_amp_state.max_loss_scale,
        )
        for _ in range(num_losses)
    ]
    for scaler in loss_scalers:
        scaler.overflow_group = overflow_group
    if properties.patch_torch_functions:
        init(
            verbose=_amp_state.verbosity >= 2,
            dtype=properties.low_precision,
            device_types=_device_types(models) or None,
        )
    elif _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    _cast_models(models, optimizers, properties)
    if optimizers or not _amp_state.loss_scalers:  # a model for inference needs none
        _amp_state.loss_scalers = loss_scalers
    for optimizer in optimizers:
        process_optimizer(optimizer, bool(properties.master_weights), loss_scalers)
