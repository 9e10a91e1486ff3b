# SPDX-License-Identifier: BSD-3-Clause
"""What random programs do to a model, its parameters and its gradients between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from ddp_program_nets import Block, Net, plain_parameters

if TYPE_CHECKING:
    from ddp_program_run import Machine

#: Changes that replace the memory of parameters, or the parameters.
OF_PARAMETERS = (
    "double", "float", "half_float", "channels_last", "data", "transposed", "load", "assign",
    "replace", "copy",
)  # fmt: skip
#: Changes under which tensor subclasses without memory do not stay what they are.
NOT_OF_SUBCLASSES = tuple(what for what in OF_PARAMETERS if what != "replace")
OF_GRADIENTS = (
    "grad_data",
    "grad_new",
    "grad_transposed",
    "grad_swapped",
    "grad_conjugated",
    "rebuild_buckets",
)
#: Rank 0's buffers are taken in the next forward.
OF_BUFFERS = ("buffers",)
CHANGES = (*OF_PARAMETERS[:-1], *OF_GRADIENTS, *OF_BUFFERS)  # "copy" is a hazard of its own


def change(machine: Machine, m: int, what: str, block: int) -> None:
    net: Net = machine.models[m]
    if what in NOT_OF_SUBCLASSES and net.has("adapter"):
        return
    if what in ("double", "float", "half_float", "data", "transposed", "channels_last"):
        machine.recast.add(m)
    if what in OF_MODULE:
        OF_MODULE[what](net)
    else:
        globals()[f"_{what}"](machine, net, m, block)
    if what in OF_PARAMETERS:
        machine.new_optimizers()


#: Changes of the module alone.
OF_MODULE: dict[str, Callable[[Net], Any]] = {
    "double": lambda net: net.double(),
    "float": lambda net: net.float(),
    "half_float": lambda net: net.half().float(),
    "channels_last": lambda net: net.to(memory_format=torch.channels_last),
}


def _data(machine: Machine, net: Net, m: int, block: int) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * 1.01


def _transposed(machine: Machine, net: Net, m: int, block: int) -> None:
    for parameter in net.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


def _grad_data(machine: Machine, net: Net, m: int, block: int) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.data = parameter.grad.data.clone()


def _grad_new(machine: Machine, net: Net, m: int, block: int) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def _grad_transposed(machine: Machine, net: Net, m: int, block: int) -> None:
    for parameter in net.parameters():
        if parameter.dim() == 2 and parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.t().contiguous().t()


def _grad_swapped(machine: Machine, net: Net, m: int, block: int) -> None:
    """Values belong to the parameter that holds them, whatever bucket they lie in."""
    parameters = [p for p in net.parameters() if p.grad is not None and not p.grad.is_sparse]
    for a, b in zip(parameters, parameters[1:], strict=False):
        if a.grad.shape == b.grad.shape and a.grad.dtype == b.grad.dtype:
            a.grad, b.grad = b.grad, a.grad


def _grad_conjugated(machine: Machine, net: Net, m: int, block: int) -> None:
    """A lazy conjugate has the same memory as its view, but another value."""
    for parameter in net.parameters():
        if parameter.is_complex() and parameter.grad is not None:
            lazily = machine.rank % 2 == 0
            parameter.grad = parameter.grad.conj() if lazily else parameter.grad.conj_physical()


def _rebuild_buckets(machine: Machine, net: Net, m: int, block: int) -> None:
    for wrapper in machine.wrappers[m]:
        wrapper.rebuild_buckets()


def _load(machine: Machine, net: Net, m: int, block: int) -> None:
    state = net.state_dict()
    net.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in state.items()})


def _assign(machine: Machine, net: Net, m: int, block: int) -> None:
    """Assign different values on each rank. The next forward broadcasts rank 0's."""
    state = {k: v.clone() for k, v in net.state_dict().items()}
    for name, _ in net.named_parameters():
        state[name] += machine.rank
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
    net.load_state_dict(state, assign=True)
    machine.replaced(net, [p for name, p in net.named_parameters() if name in frozen])


def _replace(machine: Machine, net: Net, m: int, block: int) -> None:
    b = block % len(net.blocks)
    if b == 0 and m == 1 and machine.shared:
        return
    net.blocks[b] = Block(net.blocks[b].spec)
    machine.replaced(net.blocks[b], [])


def _buffers(machine: Machine, net: Net, m: int, block: int) -> None:
    with torch.no_grad():
        for part in (part for part in net.blocks if part.kind == "buffer"):
            part.factor.add_(0.1 * (1 + machine.rank))
            machine.buffers_differ |= {i for i, n in enumerate(machine.models) if n.has("buffer")}


def _copy(machine: Machine, net: Net, m: int, block: int) -> None:
    """Replace the wrapper by a copy of itself, with copied parameters."""
    if not machine.wrappers[m] or machine.shared or m in machine.changed:
        return
    machine.unfreeze()
    last: Any = machine.wrappers[m][-1]
    twin = copy.deepcopy(last)
    if last is machine.hooked:
        machine.hooked = None  # a copy has no hook
    machine.models[m] = twin.module
    machine.wrappers[m] = [twin]
    machine.changed.add(m)


def freeze(machine: Machine, m: int, which: list[int]) -> None:
    """Freeze some parameters of a model, and unfreeze its others."""
    parameters = plain_parameters(machine.models[m])
    keep = [p for p in machine.frozen if not any(p is q for q in parameters)]
    machine.frozen = keep + [parameters[i % len(parameters)] for i in which]
    machine.apply_frozen()
