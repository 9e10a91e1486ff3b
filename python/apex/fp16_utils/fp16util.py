# SPDX-License-Identifier: BSD-3-Clause
"""Casts of networks, and copies between low-precision parameters and float32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .._internal.dtypes import convert_module as convert_module
from .._internal.dtypes import convert_modules

#: ``torch.nn.utils.clip_grad_norm_`` under the name that old scripts use.
clip_grad_norm = torch.nn.utils.clip_grad_norm_


class tofp16(torch.nn.Module):  # noqa: N801
    """Module that casts its input, of any shape, to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input.half()``."""
        return input.half()


def BN_convert_float(module: torch.nn.Module) -> torch.nn.Module:  # noqa: N802
    """Cast every affine batch normalization in `module` to float32, in place; returns `module`."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.affine:
            child.float()
    return module


def network_to_half(network: torch.nn.Module) -> torch.nn.Sequential:
    """``Sequential(tofp16(), network)`` with `network` in float16, affine batch norm in float32.

    Casts `network` in place.
    """
    return torch.nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_network(network: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast `network` to `dtype` in place, except affine batch normalization; returns `network`.

    Batch normalization without weight and bias is cast. Integer and complex tensors are not. The
    weights of recurrent modules are made contiguous again.
    """
    convert_modules(network, dtype, keep_batchnorm=True)
    return network


class FP16Model(torch.nn.Module):
    """`network` in float16 (affine batch norm in float32), with every positional input cast.

    Casts `network` in place and keeps it as the attribute ``network``.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.float16)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Run ``network`` on the inputs, cast to float16."""
        return self.network(*(tensor.half() for tensor in inputs))


def prep_param_lists(
    model: torch.nn.Module, flat_master: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters of `model` that require a gradient, and float32 masters for them.

    Args:
        model: its parameters are not changed.
        flat_master: create one flat master of all elements, with an allocated gradient.

    Returns:
        ``(model_params, master_params)``: lists of equal length, or with one master if flat.
    """
    model_params: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        masters = [torch.nn.Parameter(p.detach().float().clone()) for p in model_params]
        return model_params, list(masters)
    if not model_params:
        raise ValueError("prep_param_lists found no parameter that requires a gradient.")
    flat = torch.nn.Parameter(torch.cat([p.detach().float().reshape(-1) for p in model_params]))
    flat.grad = torch.zeros_like(flat)
    return model_params, [flat]


def _pieces(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[torch.Tensor],
    master_params: Sequence[torch.Tensor],
    flat_master: bool = False,
) -> None:
    """Copy gradients of the model's parameters to the masters (lists from `prep_param_lists`).

    If a gradient is None, the master's is set to None, or to zero in a flat master.
    """
    if flat_master:
        master = master_params[0]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        for piece, param in zip(_pieces(master.grad, model_params), model_params, strict=True):
            if param.grad is None:
                piece.zero_()
            else:
                piece.copy_(param.grad)
        return
    targets, sources = [], []
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
            continue
        if param.grad.is_sparse:
            master.grad = param.grad.float().coalesce()
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        targets.append(master.grad)
        sources.append(param.grad)
    if targets:
        torch._foreach_copy_(targets, sources)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[torch.Tensor],
    master_params: Sequence[torch.Tensor],
    flat_master: bool = False,
) -> None:
    """Copy the masters' values to the model's parameters (lists from `prep_param_lists`)."""
    sources = _pieces(master_params[0], model_params) if flat_master else list(master_params)
    if sources:
        torch._foreach_copy_(list(model_params), sources)


def to_python_float(t: Any) -> float:
    """The number in a one-element tensor (waits for its device), or the first item of a
    sequence."""
    value: float = t.item() if hasattr(t, "item") else t[0]
    return value
