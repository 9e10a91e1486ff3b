"""The work behind :func:`apex.amp.initialize`: checks, model casts, optimizers, scalers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ._amp_state import _amp_state, warn_or_err
from ._full_values import hook_state_dicts, remember
from ._process_optimizer import process_optimizer
from .amp import init
from .casts import is_low_precision, map_tensors
from .scaler import LossScaler

if TYPE_CHECKING:
    from .frontend import Properties


def cast_values(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in `value` to `dtype`.

    Nested lists, tuples, named tuples, dicts and other mappings, and objects with a ``to`` method
    are handled; strings, numbers, arrays and integer tensors come back as they are.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(value, torch.Tensor):
        return cast(value)
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return map_tensors(cast, value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_values(item, dtype) for item in value))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(cast_values(item, dtype) for item in value)
    if isinstance(value, dict):
        cast_items = {key: cast_values(item, dtype) for key, item in value.items()}
        return cast_items if type(value) is dict else _like(value, cast_items)
    if isinstance(value, (str, bytes, torch.nn.Module)) or not hasattr(value, "to"):
        return value
    return value.to(dtype)


def _like(original: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """`items` in a mapping of the type of `original` (OrderedDict, defaultdict, model outputs)."""
    try:
        clone = original.copy()
    except (AttributeError, TypeError):
        return items
    for key, item in items.items():
        clone[key] = item
    return clone


class CastForward:
    """Stands in for ``model.forward``: casts floating inputs and outputs.

    An object, not a closure, so that a deep copy or an unpickled model runs its own parameters.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
    ) -> None:
        self.old_forward = forward
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_dtype is not None:
            args = tuple(cast_values(arg, self.input_dtype) for arg in args)
            kwargs = {key: cast_values(value, self.input_dtype) for key, value in kwargs.items()}
        output = self.old_forward(*args, **kwargs)
        if self.output_dtype is None:
            return output
        return cast_values(output, self.output_dtype)


def _check_models(models: list[torch.nn.Module]) -> None:
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    for model in models:
        if isinstance(model, wrappers):
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


def fp16_optimizer() -> type:
    """The class FP16_Optimizer; imported late, since its package imports this one."""
    from ..fp16_utils import FP16_Optimizer

    return FP16_Optimizer


def _check_optimizers(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, fp16_optimizer()):
            raise RuntimeError(
                "amp.initialize was given an FP16_Optimizer; pass the optimizer it wraps, amp "
                "keeps master weights itself."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"amp.initialize takes torch optimizers, not {type(optimizer).__name__}."
            )
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise RuntimeError(
            "An optimizer was passed to amp.initialize twice; pass each optimizer once."
        )


def _remember_values(optimizers: list[torch.optim.Optimizer]) -> dict[int, torch.Tensor]:
    return {
        id(param): param.detach().clone()
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and param.dtype == torch.float32
    }


def _cast_model(model: torch.nn.Module, properties: Properties) -> None:
    dtype = properties.cast_model_type
    if properties.keep_batchnorm_fp32:
        from ..fp16_utils import convert_network

        convert_network(model, dtype)
    else:
        model.to(dtype)
    output_dtype = properties.cast_model_outputs or torch.float32
    model.forward = CastForward(model.forward, dtype, output_dtype)
    if dtype in (torch.float16, torch.bfloat16):
        hook_state_dicts(model, keep_full_values=bool(properties.master_weights))


def _recast_state(optimizer: torch.optim.Optimizer) -> None:
    """Bring the state of `optimizer` to the types its parameters have now."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _device_types(models: list[torch.nn.Module]) -> set[str]:
    """Device types that level O1 casts: every accelerator, the CPU only where models live there."""
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
        values = _remember_values(optimizers) if properties.master_weights else {}
        for model in models:
            _cast_model(model, properties)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if id(param) in values and is_low_precision(param):
                        remember(param, values[id(param)])
            # With masters the state stays float32 and moves to them.
            if not properties.master_weights:
                _recast_state(optimizer)
    elif properties.cast_model_outputs:
        for model in models:
            model.forward = CastForward(model.forward, None, properties.cast_model_outputs)


def setup(
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    properties: Properties,
    num_losses: int,
) -> None:
    """Apply `properties` to `models` and `optimizers`, in place."""
    _check_models(models)
    _check_optimizers(optimizers)
    for optimizer in optimizers:
        if hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                "An optimizer was passed to amp.initialize twice; pass each optimizer once."
            )
    _cast_models(models, optimizers, properties)
    for optimizer in optimizers:
        process_optimizer(optimizer, bool(properties.master_weights))
    _amp_state.optimizers = list(optimizers)
    _amp_state.loss_scalers = [
        LossScaler(
            properties.loss_scale,
            min_loss_scale=_amp_state.min_loss_scale,
            max_loss_scale=_amp_state.max_loss_scale,
        )
        for _ in range(num_losses)
    ]
    if properties.patch_torch_functions:
        init(
            verbose=_amp_state.verbosity >= 2,
            dtype=properties.low_precision,
            device_types=_device_types(models),
        )
    elif _amp_state.handle is not None:
        _amp_state.handle._deactivate()
