"""float32 values of parameters whose storage was cast to a low-precision type.

Note [One value, two precisions]
At O2 a parameter exists twice: as the low-precision tensor the model computes with, and as a
float32 value (the master weight, once the optimizer has made one). Whatever can be saved or
restored has to go through the float32 value, or a resumed run differs from one that never stopped.
So ``initialize`` remembers the values it casts, masters are made from them, ``state_dict`` of the
model returns them, and ``load_state_dict`` sets them. A remembered value counts only where it
still rounds to what the parameter holds, element by element: whoever writes into the parameter
wins, and nothing stale comes back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .casts import is_low_precision

_values: Any = WeakIdKeyDictionary()


def remember(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Let `value` (float32, same shape) stand for the low-precision `parameter`; not copied."""
    _values[parameter] = value


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """A new float32 tensor: the remembered value of `tensor` where it fits, else `tensor` cast."""
    widened = tensor.detach().float()
    value = _values.get(tensor)
    if value is None or value.shape != tensor.shape:
        return widened
    value = value.detach().to(tensor.device)
    return torch.where(value.to(tensor.dtype) == tensor.detach(), value, widened)


def _save_full(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
    tensors.update(module.named_buffers(recurse=False))
    for name, tensor in tensors.items():
        saved = state.get(prefix + name)
        # With keep_vars=True the caller asked for the parameter itself.
        if isinstance(saved, torch.Tensor) and saved is not tensor and is_low_precision(saved):
            state[prefix + name] = full_value(tensor)


def _load_full(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        loaded = state.get(prefix + name)
        if not isinstance(loaded, torch.Tensor) or not is_low_precision(parameter):
            continue
        if loaded.shape != parameter.shape or not loaded.is_floating_point():
            continue
        with torch.no_grad():
            known = _values.get(parameter)
            if known is not None:
                # The value may be a master weight that an optimizer holds: write into it.
                known.copy_(loaded)
            elif parameter.requires_grad:
                remember(parameter, loaded.detach().to(parameter.device, torch.float32, copy=True))


def hook_state_dicts(model: torch.nn.Module, keep_full_values: bool) -> None:
    """Make ``state_dict`` of `model` and its submodules float32.

    With `keep_full_values`, loading also remembers the float32 values it rounds.
    """
    for module in model.modules():
        module.register_state_dict_post_hook(_save_full)
        if keep_full_values:
            module.register_load_state_dict_pre_hook(_load_full)
