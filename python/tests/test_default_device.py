# SPDX-License-Identifier: BSD-3-Clause
"""A script's ``torch.set_default_device`` does not affect the tensors that the package creates."""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_support import RankPool, check_equal, forget_amp
from torch import Tensor, nn
from torch.utils._device import _device_constructors

import amp_C
import apex
import apex_C
from apex import amp, optimizers
from apex.fp16_utils import FP16_Optimizer, network_to_half
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.parallel import (
    DistributedDataParallel,
    Reducer,
    convert_syncbn_model,
)
from apex.parallel.LARC import LARC

FACTORIES = {function.__name__ for function in _device_constructors()}


def _without_device(source: str) -> list[str]:
    """Calls of torch's functions that create a tensor on the default device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_tensor_of_the_package_names_its_device() -> None:
    found = {}
    for package in (apex, amp_C, apex_C):
        for path in Path(package.__file__).parent.rglob("*.py"):
            text = path.read_text()
            # A name without its module would not be detected.
            assert "from torch import *" not in text
            imported = [
                alias.name
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom) and node.module == "torch"
                for alias in node.names
            ]
            assert not FACTORIES.intersection(imported), path
            if calls := _without_device(text):
                found[str(path)] = calls
    assert not found
    assert _without_device("x = torch.zeros(3)") and not _without_device("x = torch.zeros_like(y)")


@contextlib.contextmanager
def default_device(name: str | None) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)
        forget_amp()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.layer_norm, self.rms_norm = FusedLayerNorm(8), FusedRMSNorm(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(self.rms_norm(self.layer_norm(hidden)))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def _plain(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    _loss(model, x).backward()
    optimizer.step()


def _with_amp(level: str) -> Callable[[nn.Module, list[Tensor]], list[Tensor]]:
    def run(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        optimizer = optimizers.FusedAdam(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
        )
        wrapped = DistributedDataParallel(model)
        for number, x in enumerate(batches):
            optimizer.zero_grad()
            with amp.scale_loss(_loss(wrapped, x), optimizer) as scaled:
                scaled.backward()
                if number == 1:
                    model.last.weight.grad[0, 0] = float("inf")
            optimizer.step()
        state = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
        for part, saved in zip((model, optimizer, amp), state, strict=True):
            part.load_state_dict(saved)
        return list(amp.master_params(optimizer))

    return run


def _with_optimizer(make: Callable[[Any], Any]) -> Callable[..., list[Tensor]]:
    def run(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        optimizer = make(model.parameters())
        for x in batches:
            _plain(model, optimizer, x)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _plain(model, optimizer, batches[0])
        return list(model.parameters())

    return run


def _with_options(**options: Any) -> Callable[..., list[Tensor]]:
    def run(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        wrapped = DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches:
            _plain(wrapped, optimizer, x)
        return [*model.parameters(), *model.buffers()]

    return run


def _sync_batch_norm(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return _with_options()(convert_syncbn_model(model), batches)


def _uneven(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    wrapped = DistributedDataParallel(model, broadcast_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped.join():
        for x in batches[: 3 - torch.distributed.get_rank()]:
            _plain(wrapped, optimizer, x)
    return list(model.parameters())


def _reducer(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    reducer = Reducer(model)
    for x in batches:
        model.zero_grad()
        _loss(model, x).backward()
        reducer.reduce()
    return [parameter.grad for parameter in model.parameters()]


def _fp16_optimizer(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    model = network_to_half(model)
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True, verbose=False
    )
    for x in batches:
        optimizer.zero_grad()
        optimizer.backward(_loss(model, x))
        optimizer.step()
    return list(model.parameters())


def _multi_tensor(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    lists = [[x.clone() for x in batches] for _ in range(3)]
    flag = batches[0].new_zeros(1).int()
    amp_C.multi_tensor_scale(65536, flag, lists[:2], 0.5)
    amp_C.multi_tensor_axpby(65536, flag, lists, 2.0, 3.0, -1)
    norm, each = amp_C.multi_tensor_l2norm(65536, flag, [lists[0]], True)
    flat = apex_C.flatten(lists[2])
    return [flag, norm, each, flat, *apex_C.unflatten(flat, lists[2])]


RUNS: dict[str, Callable[[nn.Module, list[Tensor]], list[Tensor]]] = {
    **{f"amp {level}": _with_amp(level) for level in ("O0", "O1", "O2", "O3", "O2-bf16")},
    **{
        name: _with_optimizer(lambda p, name=name: getattr(optimizers, name)(p, lr=0.1))
        for name in ("FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad")
    },
    "FusedSGD": _with_optimizer(lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9)),
    "without correction": _with_optimizer(
        lambda p: optimizers.FusedAdam(p, lr=0.1, bias_correction=False)
    ),
    "LARC": _with_optimizer(lambda p: LARC(torch.optim.SGD(p, lr=0.1))),
    "wrapper": _with_options(),
    "buffers": _with_options(broadcast_buffers=True),
    "checks": _with_options(check_reduction=True, check_finite=True, gradient_as_bucket_view=True),
    "delayed": _with_options(delay_allreduce=True, allreduce_always_fp32=True),
    "SyncBatchNorm": _sync_batch_norm,
    "join": _uneven,
    "Reducer": _reducer,
    "FP16_Optimizer": _fp16_optimizer,
    "amp_C": _multi_tensor,
}


def _same_with_any_default(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(6, 4, generator=generator) for _ in range(3)]
    for name, run in RUNS.items():
        found = []
        for device in (None, "meta"):
            model = Net()
            with default_device(device):
                found.append([tensor.detach() for tensor in run(model, batches)])
        for wanted, tensor in zip(*found, strict=True):
            check_equal(tensor.device.type, "cpu", name)
            check_equal(tensor, wanted, name)


@pytest.mark.processes
def test_everything_computes_the_same_whatever_the_default_device_is(ranks: RankPool) -> None:
    ranks.run(2, _same_with_any_default)
