# SPDX-License-Identifier: BSD-3-Clause
"""The implementation of :func:`apex.amp.initialize`: checks, casts, optimizers, scalers."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._internal.dtypes import LOW_PRECISION_DTYPES, convert_modules, is_low_precision
from .._internal.refused import DataParallelWrapper, KeepsMasterWeights
from .._internal.tree import map_tensors
from ._amp_state import _amp_state, several_ranks, warn_or_err
from ._full_values import hook_state_dicts, remember
from ._handle import disable_casts
from ._process_optimizer import (
    adopt_before_load,
    process_optimizer,
    refuse_master_weights,
)
from .amp import init
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


def _check_scripted(models: list[torch.nn.Module], dtype: torch.dtype) -> None:
    for model in models if dtype in LOW_PRECISION_DTYPES else ():
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise RuntimeError(
                    f"amp.initialize cannot cast the scripted module {name or 'itself'!r}, whose "
                    "state_dict() cannot be made float32: script after initialize, or use level O1."
                )


def _check_sharded(models: list[torch.nn.Module], dtype: torch.dtype) -> None:
    """Refuse to cast FSDP2 (fully_shard) parameters: it would still gather the old dtype."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or dtype not in LOW_PRECISION_DTYPES:
        return
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, fsdp.FSDPModule):
                raise RuntimeError(
                    f"amp.initialize cannot cast the module {name or 'itself'!r}, whose parameters "
                    "fully_shard has sharded: use level O1, which casts no parameters, or "
                    "fully_shard's MixedPrecisionPolicy."
                )


def _check_hooks(models: list[torch.nn.Module], dtype: torch.dtype) -> None:
    """Refuse to cast parameters in torch's DistributedDataParallel.

    Its hooks are on the gradient accumulators, which autograd replaces when the dtype changes, so
    it would no longer average the gradients. (Our wrapper checks for this before each forward.)
    """
    if not several_ranks():
        return
    cast = {id(p) for m in models for p in m.parameters() if p.requires_grad and p.dtype != dtype}
    for wrapper in [thing for thing in gc.get_objects() if issubclass(type(thing), _TORCH_DDP)]:
        for name, parameter in wrapper.named_parameters():
            if id(parameter) in cast:
                raise RuntimeError(
                    f"amp.initialize would cast the parameter {name!r}, which a "
                    "torch.nn.parallel.DistributedDataParallel already wraps, and its gradient "
                    "would no longer be averaged. Call amp.initialize before the model is wrapped, "
                    "or use level O1, which casts no parameters, or "
                    "apex.parallel.DistributedDataParallel, which may be constructed first."
                )


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


def _remember_values(params: list[torch.Tensor], trained: set[int]) -> dict[int, torch.Tensor]:
    """Float32 copies. On the CPU if no optimizer has the parameter, which may never be trained."""
    return {
        id(param): param.detach().to(
            param.device if id(param) in trained or param.is_meta else "cpu",
            torch.float32,
            copy=True,
        )
        for param in params
        if param.requires_grad and param.dtype in (torch.float32, torch.float64)
    }


def _cast_model(model: torch.nn.Module, properties: Properties) -> None:
    dtype = properties.cast_model_type
    convert_modules(model, dtype, keep_batchnorm=bool(properties.keep_batchnorm_fp32))
    output_dtype = properties.cast_model_outputs or torch.float32
    o1 = bool(properties.patch_torch_functions)
    model.forward = CastForward(model.forward, dtype, output_dtype, o1)
    if dtype in LOW_PRECISION_DTYPES:
        hook_state_dicts(model, keep_full_values=bool(properties.master_weights))
        adopt_before_load()


def _recast_state(optimizer: torch.optim.Optimizer) -> None:
    """Cast the state of `optimizer` to the current dtypes of its parameters."""
    if getattr(optimizer, "state", None):  # a wrapper may have no state
        optimizer.load_state_dict(optimizer.state_dict())


def _device_types(models: list[torch.nn.Module]) -> set[str]:
    """Device types that level O1 casts: every accelerator, and the CPU only if models are on it."""
    kinds = {param.device.type for model in models for param in model.parameters()} - {"meta"}
    if torch.cuda.is_available():
        kinds.add("cuda")
    return kinds or {"cpu"}


def _cast_models(
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    properties: Properties,
) -> None:
    if properties.cast_model_type:
        keep = properties.master_weights and not several_ranks()
        # Parameters of models too, because an optimizer may get them later.
        every = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        trained = set(map(id, every))
        every += [p for model in models for p in model.parameters()]
        params = list({id(param): param for param in every}.values())
        values = _remember_values(params, trained) if keep else {}
        for model in models:
            _cast_model(model, properties)
        for param in params:
            if id(param) in values and is_low_precision(param):
                remember(param, values[id(param)])
        for optimizer in optimizers:
            # With master weights, the state stays float32 and moves to them.
            if not properties.master_weights:
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
    if properties.cast_model_type:
        _check_scripted(models, properties.cast_model_type)
        _check_sharded(models, properties.cast_model_type)
        _check_hooks(models, properties.cast_model_type)
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
            device_types=_device_types(models),
        )
    elif _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    _cast_models(models, optimizers, properties)
    _amp_state.latest_scalers = loss_scalers
    _amp_state.adopt(*optimizers)
    for optimizer in optimizers:
        process_optimizer(optimizer, bool(properties.master_weights), loss_scalers)
