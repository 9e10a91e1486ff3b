"""``DistributedDataParallel(mixed_precision=...)``: forward in a narrow dtype, parameters in their
own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

WIRES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class MixedPrecision:
    """Runs a module with casts of its parameters, buffers and inputs.

    Gradients flow back through the casts, so ``.grad`` has the parameter's own dtype, and
    parameters and buffers in checkpoints have theirs.

    Args:
        given: anything with the attributes ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``
            (each a floating dtype or None), as torch's ``_MixedPrecision``.

    Raises:
        TypeError: for something else.
    """

    def __init__(self, given: Any) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(given, name, "missing")
            floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if dtype is not None and not floating:
                raise TypeError(
                    "mixed_precision takes an object with param_dtype, reduce_dtype and "
                    f"buffer_dtype, each a floating torch.dtype or None; {name} is {dtype!r}."
                )
        self.param_dtype: torch.dtype | None = given.param_dtype
        self.buffer_dtype: torch.dtype | None = given.buffer_dtype
        self.reduce_dtype: torch.dtype | None = given.reduce_dtype or given.param_dtype
        # torch's class has none: inputs are cast.
        self.cast_forward_inputs = bool(getattr(given, "cast_forward_inputs", True))

    @property
    def wire(self) -> str | None:
        """The built-in communication hook for ``reduce_dtype``; None: gradients as they are."""
        return WIRES.get(self.reduce_dtype) if self.reduce_dtype is not None else None

    def call(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.cast_forward_inputs and self.param_dtype is not None:
            inputs = _cast(inputs, self.param_dtype)
            kwargs = _cast(kwargs, self.param_dtype)
        replaced = _casts(dict(module.named_parameters()), self.param_dtype)
        buffers = dict(module.named_buffers())
        narrow = _casts(buffers, self.buffer_dtype)
        output = torch.func.functional_call(module, {**replaced, **narrow}, inputs, kwargs)
        with torch.no_grad():
            for name, tensor in narrow.items():
                # One that the module left alone keeps its digits. (Not every kernel counts
                # versions.)
                if not torch.equal(tensor, buffers[name].to(tensor.dtype)):
                    buffers[name].copy_(tensor)
        return output


def _casts(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    if dtype is None:
        return {}
    return {
        name: tensor.to(dtype)
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.dtype != dtype
    }


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in nested containers, cast."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _cast(item, dtype)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        cast = [_cast(item, dtype) for item in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _cast(getattr(value, f.name), dtype) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value
