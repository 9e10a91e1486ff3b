# SPDX-License-Identifier: BSD-3-Clause
"""The base of the optimizers that torch does not have: float32 arithmetic on lists of tensors.

Apex's kernels read parameters, gradients and state of any precision and compute in float32. Here,
low-precision parameters are cast to float32 for the update and rounded once at its end. Their state
is kept in float32, while Apex rounds it to the parameter's dtype after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .._internal.dtypes import alike
from ._state import WideState, refuse_gradients, wide_type


class Batch:
    """Parameters of one group, device and dtype, with the inputs and outputs of an update.

    Attributes:
        params: wide values of the parameters. The update changes them, and :meth:`write_back`
            copies them to the parameters.
        grads: wide values of the gradients, read-only.
    """

    def __init__(self, members: list[Tensor]) -> None:
        self._members = members
        self.dtype = wide_type(members[0].dtype)
        self.device = members[0].device
        self.params = _wide(members, self.dtype)
        self.grads = _wide([_grad(member) for member in members], self.dtype)

    def write_back(self) -> None:
        """Round the values into the parameters, unless these are wide themselves."""
        if self.params[0] is not self._members[0]:
            torch._foreach_copy_(self._members, self.params)


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _wide(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if tensors[0].dtype == dtype:
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def norms(tensors: list[Tensor], order: float = 2) -> list[Tensor]:
    """The norm of each tensor, 0-dim, in its wide dtype.

    All tensors must be on one device and of one dtype. An empty tensor has norm 0.
    """
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    if not filled:
        return [_zero_norm(tensor) for tensor in tensors]
    found = iter(torch._foreach_norm(filled, order, dtype=wide_type(filled[0].dtype)))
    return [next(found) if tensor.numel() > 0 else _zero_norm(tensor) for tensor in tensors]


def _zero_norm(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=wide_type(tensor.dtype), device=tensor.device)


def on_device(value: Any, device: torch.device) -> Any:
    """A group's setting, ready for arithmetic on `device`. A learning rate may be a tensor."""
    return value.to(device).reshape(()) if isinstance(value, Tensor) else value


class ForeachOptimizer(WideState):
    """Base class of FusedLAMB, FusedNovoGrad and FusedAdagrad. A derived class defines ``_update``.

    Accepts parameters of any floating-point dtype on any device, with dense real gradients. The
    number of steps is in each group as ``step``, where Apex's classes keep it and scripts read it.
    """

    #: Names of settings that are attributes of the object and not entries of its groups.
    _own_settings: tuple[str, ...] = ("set_grad_none",)
    set_grad_none: bool

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Optimizer.add_param_group`` does.

        Raises:
            ValueError: a negative `lr`, `eps` or `weight_decay`, or `betas` outside of [0, 1).
        """
        settings, own = {**self.defaults, **param_group}, type(self).__name__
        for name in ("lr", "eps", "weight_decay"):
            value = settings[name]
            if not isinstance(value, Tensor) and not (
                isinstance(value, Real) and float(value) >= 0
            ):
                raise ValueError(f"{own}: {name} is {value!r}; it must be 0 or more.")
        betas = settings.get("betas", (0.0, 0.0))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{own}: betas are {betas!r}; pass two numbers, from 0 to below 1.")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, by default as ``set_grad_none`` specifies."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Copies nothing to the host.

        Args:
            closure: evaluated first, once; its result is returned.

        Raises:
            RuntimeError: a gradient is sparse or complex. Nothing was changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_gradients(self, complex_too=True)
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError

    def _count_step(self, group: dict[str, Any]) -> int:
        step = int(group.get("step") or 0) + 1
        group["step"] = step
        return step

    def _batches(self, group: dict[str, Any]) -> Iterator[tuple[list[Tensor], Batch]]:
        """Batches of the parameters of `group` that have a gradient. A batch is written back when
        the next one is requested."""
        for members in alike(group["params"]):
            batch = Batch(members)
            yield members, batch
            batch.write_back()

    def _state_of(self, members: Iterable[Tensor], name: str) -> list[Tensor]:
        """The state `name` of each parameter: its shape, its wide dtype, initially zeros."""
        found = []
        for param in members:
            state = self.state[param]
            if name not in state:
                state[name] = torch.zeros_like(param, dtype=wide_type(param.dtype))
            found.append(state[name])
        return found

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self._own_settings}
        return {**super().__getstate__(), **own}
