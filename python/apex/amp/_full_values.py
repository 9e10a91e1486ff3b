# SPDX-License-Identifier: BSD-3-Clause
"""float32 values of parameters whose storage was cast to a low-precision dtype.

Note [One value, two precisions]
At O2 a parameter has two representations: the low-precision tensor that the model computes with,
and a float32 value (the master weight, once the optimizer has created one). Saving and loading must
use the float32 value, or a resumed run differs from an uninterrupted one. So ``initialize``
remembers the values that it casts, master weights are created from them, the model's ``state_dict``
returns them, and ``load_state_dict`` sets them. A remembered value is used only for those elements
where it still rounds to the parameter's value. A later write to the parameter therefore takes
precedence, and stale values are never used. Every backward checks this until the first step, and
again after a load.

Note [Values that only one rank has] With several ranks this check is not enough. After a broadcast
of the parameters, rank 0's remembered values still round to its parameters, and those of the other
ranks do not. Rank 0 cannot detect the broadcast. The same happens if rank 0 alone loads a model and
a wrapper broadcasts it. So with several ranks, neither values from before the cast nor values of a
model's state are used. Master weights start from the parameters, as in Apex, and ranks agree
whenever their parameters do. Unrounded values come from the optimizer's state, which every rank
must load in any case.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._internal.dtypes import is_low_precision
from ._amp_state import several_ranks


class FullValue:
    """The known float32 values of one low-precision parameter."""

    def __init__(self) -> None:
        self.master: torch.Tensor | None = None
        #: From before a cast, or from a model's state: Note [Values that only one rank has].
        self.remembered: torch.Tensor | None = None
        #: A master weight from the optimizer's state.
        self.restored: torch.Tensor | None = None
        #: The master weight was created with several ranks, from values that all ranks know. If it
        #: differs from the parameter, the script has written to it.
        self.known_to_all = False
        #: Whether the master weight was stepped, and whether nothing was loaded since then.
        self.stepped = self.settled = False
        #: The gradients at the end of a scale_loss context: ``mark`` of the model's gradient,
        #: address of the master's.
        self.gradient_left: tuple[tuple[int, int], int] = ((-1, -1), -1)
        #: The largest absolute value of the model's gradient at that time, on its device.
        self.largest_left: torch.Tensor | None = None
        #: Version and address of the master weight and of the parameter when they last agreed.
        self._master_then: tuple[int, int] | None = None
        self._parameter_then: tuple[int, int] | None = None

    def note_agreement(self, parameter: torch.Tensor) -> None:
        """Record that `parameter` and its master weight agree, up to rounding."""
        self._master_then = None if self.master is None else _written(self.master)
        self._parameter_then = _written(parameter)

    def note_load(self) -> None:
        """Record that a state was loaded, so the master weight must be created again."""
        self._parameter_then, self.settled = None, False
        if self.master is not None:
            self._master_then = _written(self.master)

    def master_changed(self) -> bool:
        """Whether the master weight was written since then, with a version or address change."""
        return self.master is not None and _written(self.master) != self._master_then

    def parameter_changed(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` was written since then, or a state was loaded."""
        return _written(parameter) != self._parameter_then

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """A new float32 tensor: the known value where it rounds to `parameter`, else that."""
        value = parameter.detach().float()
        alone = not several_ranks()
        for known, counts in (
            # A value loaded since then replaces the master's.
            (
                self.master,
                (alone or self.stepped or self.known_to_all) and self.remembered is None,
            ),
            (self.remembered, alone),
            (self.restored, True),
        ):
            if known is not None and counts:
                value = _where_fits(known, parameter, value)
        return value


_records: Any = WeakIdKeyDictionary()
#: Parameters of models at O2.
_to_get_masters: Any = WeakIdKeyDictionary()


def _written(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()


def _where_fits(value: torch.Tensor, parameter: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if value.shape != parameter.shape:
        return other
    value = value.detach().to(parameter.device)
    return torch.where(value.to(parameter.dtype) == parameter.detach(), value, other)


def follow(master: torch.Tensor, parameter: torch.Tensor) -> None:
    """Set elements of `master` that do not round to `parameter` to those of `parameter`."""
    with torch.no_grad():
        master.copy_(_where_fits(master, parameter, parameter.float()))


def record_of(parameter: torch.Tensor) -> FullValue:
    """The record of `parameter`, created if missing."""
    record: FullValue | None = _records.get(parameter)
    if record is None:
        record = _records[parameter] = FullValue()
    return record


def remember(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Use `value` (float32, same shape) as the value of low-precision `parameter`; not copied."""
    record = record_of(parameter)
    record.remembered = None if several_ranks() else value
    if record.remembered is not None:
        record.restored = None  # it is older
    record.note_load()


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """A new float32 tensor: the known value where it rounds to `tensor`, else `tensor` cast."""
    record = _records.get(tensor)
    return tensor.detach().float() if record is None else record.read(tensor)


def gets_master(parameter: torch.Tensor) -> bool:
    """Whether `parameter` is a trained low-precision parameter of a model at O2, or of a copy."""
    ours = parameter in _to_get_masters or parameter in _records
    return ours and parameter.requires_grad and is_low_precision(parameter)


def set_full_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Use `value` as the float32 value of `tensor`, its rounding, on any number of ranks."""
    record = record_of(tensor)
    record.remembered, record.restored = None, value
    record.note_load()


def copy_record(parameter: torch.Tensor, copied: torch.Tensor) -> None:
    """Give `copied`, a copy of `parameter`, the same float32 value."""
    record = _records.get(parameter)
    if record is None or copied is parameter:
        return
    _set_value(copied, record.read(parameter), record.stepped)


def _set_value(parameter: torch.Tensor, value: torch.Tensor, stepped: bool) -> None:
    """Use `value` for `parameter`. With several ranks, only if it was stepped."""
    if stepped:
        set_full_value(parameter, value)
    else:
        remember(parameter, value)


class _SaveFull:
    """A state-dict hook that makes one module's state float32. Copies of the module keep the
    values.

    This object implements deep copy and pickling, because hooks are the only part of a module that
    is notified of them.
    """

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    def __call__(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
        tensors.update(module.named_buffers(recurse=False))
        for name, tensor in tensors.items():
            saved = state.get(prefix + name)
            # With keep_vars=True the caller requests the parameter itself.
            if isinstance(saved, torch.Tensor) and saved is not tensor and is_low_precision(saved):
                state[prefix + name] = full_value(tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> _SaveFull:
        module = None if self._module is None else self._module()
        copied = _SaveFull(memo.get(id(module)))
        vars(copied).update({key: v for key, v in vars(self).items() if key != "_module"})
        if module is not None:
            for parameter in module.parameters(recurse=False):
                copy_record(parameter, copy.deepcopy(parameter, memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        module = None if self._module is None else self._module()
        state = {key: value for key, value in vars(self).items() if key != "_module"}
        state["values"] = [
            (parameter, record.read(parameter), record.stepped)
            for parameter in (() if module is None else module.parameters(recurse=False))
            if (record := _records.get(parameter)) is not None
        ]
        return _SaveFull, (module,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = state.pop("values", ())
        vars(self).update(state)
        for parameter, value, stepped in values:
            _set_value(parameter, value, stepped)


def _load_full(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        loaded = state.get(prefix + name)
        if not isinstance(loaded, torch.Tensor) or not is_low_precision(parameter):
            continue
        if loaded.shape != parameter.shape or not loaded.is_floating_point() or loaded.is_meta:
            continue
        # On the CPU, because the model may never be trained.
        value = loaded.detach().to("cpu", torch.float32, copy=True)
        if (
            parameter.requires_grad
            or parameter in _records
            or not torch.equal(value.to(parameter.dtype).float(), value)
        ):
            remember(parameter, value)


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


def hook_state_dicts(model: torch.nn.Module, keep_full_values: bool) -> None:
    """Make ``state_dict`` of `model` and its submodules float32.

    Loading such a state with ``assign=True`` is refused. With `keep_full_values`, loading also
    remembers the float32 values that it rounds.
    """
    for module in model.modules():
        module.register_state_dict_post_hook(_SaveFull(module))
        module.register_load_state_dict_pre_hook(_refuse_assign)
        if keep_full_values:
            module.register_load_state_dict_pre_hook(_load_full)
            _to_get_masters.update(dict.fromkeys(module.parameters(recurse=False)))
