# SPDX-License-Identifier: BSD-3-Clause
"""The base of the optimizers: arithmetic in float32, or wider, on lists of tensors.

Apex's kernels read parameters, gradients and state of any precision and compute in float32. Here,
low-precision parameters are cast to float32 for the update and rounded once at its end. Their state
is kept in float32: in float16 the square of a small gradient is 0, and in bfloat16 its running
average stagnates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .._internal.dtypes import alike

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are updated: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Batch:
    """Parameters of one group, device and dtype, with the inputs and outputs of an update.

    Attributes:
        params: wide values of the parameters. The update changes them, and :meth:`write_back`
            copies them to the parameters.
        grads: wide values of the gradients, read-only, times `factor`.
    """

    def __init__(self, members: list[Tensor], factor: float | None = None) -> None:
        self._members = members
        self.dtype = wide_type(members[0].dtype)
        self.device = members[0].device
        self.params = _wide(members, self.dtype)
        self.grads = _wide([_grad(member) for member in members], self.dtype)
        if factor is not None:
            self.grads = list(torch._foreach_mul(self.grads, factor))

    def write_back(self) -> None:
        """Round the values into the parameters, unless these are wide themselves."""
        if self.params[0] is not self._members[0]:
            torch._foreach_copy_(self._members, self.params)


def fits_fused_kernel(params: list[Tensor], *others: list[Tensor]) -> bool:
    """Whether torch's fused kernels may update `params`, with gradients and state in `others`.

    They combine the elements of parameter, gradient and state at the same memory offset, not at
    the same index, and nothing checks the layout.
    """
    return params[0].device.type in _FUSED_DEVICES and all(
        _is_dense(row[0]) and all(other.stride() == row[0].stride() for other in row)
        for row in zip(params, *others, strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether no elements of `tensor` overlap, and none of another tensor lie between them."""
    if tensor.is_contiguous():
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


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


class ForeachOptimizer(torch.optim.Optimizer):
    """Base class of the fused optimizers. A derived class defines ``_update``.

    Accepts parameters of any floating-point dtype on any device, with dense real gradients.
    ``torch.amp.GradScaler`` sets two tensors for a step, ``grad_scale`` and ``found_inf``, which
    the host reads. If ``found_inf`` is set, the step changes nothing and creates no state.
    """

    #: Names of settings that are attributes of the object and not entries of its groups.
    _own_settings: tuple[str, ...] = ("set_grad_none",)
    _step_supports_amp_scaling = True
    set_grad_none: bool

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Optimizer.add_param_group`` does.

        Raises:
            ValueError: a negative `lr`, `eps`, `momentum` or `weight_decay`, or `betas` outside of
                [0, 1).
        """
        settings, own = {**self.defaults, **param_group}, type(self).__name__
        for name in ("lr", "eps", "weight_decay", "momentum"):
            value = settings.get(name, 0.0)
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
        """Update every parameter that has a gradient.

        Args:
            closure: evaluated first, once; its result is returned.

        Raises:
            RuntimeError: a gradient is sparse or complex. Nothing was changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_gradients()
        if not bool(getattr(self, "found_inf", False)):
            self._update()
        return loss

    def _refuse_gradients(self) -> None:
        own = type(self).__name__
        remedies = {"sparse": "torch.optim.SGD" if "SGD" in own else "torch.optim.SparseAdam"}
        remedies["complex"] = "torch.optim.Adam"
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                grad = param.grad
                if grad is None or not (grad.is_sparse or grad.is_complex()):
                    continue
                kind = "sparse" if grad.is_sparse else "complex"
                raise RuntimeError(
                    f"{own} does not support {kind} gradients, and parameter {index} of group "
                    f"{number} has one: leave it to {remedies[kind]}."
                )

    def _update(self) -> None:
        raise NotImplementedError

    def _count_step(self, group: dict[str, Any]) -> int:
        """Count the step in the group, where Apex's classes keep it and scripts read it."""
        step = int(group.get("step") or 0) + 1
        group["step"] = step
        return step

    def _factor(self) -> float | None:
        """What gradients are multiplied by, for GradScaler."""
        scale = getattr(self, "grad_scale", None)
        return None if scale is None else 1.0 / float(scale)

    def _batches(self, group: dict[str, Any]) -> Iterator[tuple[list[Tensor], Batch]]:
        """Batches of the parameters of `group` that have a gradient. A batch is written back when
        the next one is requested."""
        for members in alike(group["params"]):
            batch = Batch(members, self._factor())
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, of torch's class, or of Apex's class of the same name.

        torch would round the state to the dtype of the parameters; here it stays wide. Settings
        that the saved groups do not have are kept. torch counts steps only with the parameters,
        Apex only in the group.
        """
        groups = []
        for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=False):
            kept = {key: own[key] for key in self.defaults if key in own}
            group = {**kept, **saved}
            steps = [state_dict["state"].get(index, {}).get("step") for index in saved["params"]]
            if isinstance(saved.get("step"), Tensor):  # Apex's with capturable=True
                group["step"] = int(saved["step"])
            elif any(step is not None for step in steps):
                group.setdefault("step", max(int(step) for step in steps if step is not None))
            groups.append(group)
        groups += state_dict["param_groups"][len(groups) :]  # torch's check of their number raises
        loaded = {**state_dict, "param_groups": groups}
        # Before the post-hooks of others, so that these see the final state.
        hook = self.register_load_state_dict_post_hook(
            lambda _: self._load_wide(loaded), prepend=True
        )
        try:
            super().load_state_dict(loaded)
        finally:
            hook.remove()

    def _load_wide(self, state_dict: dict[str, Any]) -> None:
        members = [param for group in self.param_groups for param in group["params"]]
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for param, index in zip(members, saved, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    continue
                dtype = torch.float32 if name == "step" else wide_type(param.dtype)
                self.state[param][name] = value.detach().to(param.device, dtype, copy=True)
