# SPDX-License-Identifier: BSD-3-Clause
"""How often the host waits for the device in an iteration, and where a skip is decided.

Every copy of a value to the host (``item``, ``bool``, ``float``, also inside C++) is one operator
for the dispatcher, so it can be counted, on the CPU as well as on a GPU.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amp_support import fresh_amp  # noqa: F401
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from apex import amp
from apex.amp import _amp_state, _device_skip, _overflow
from apex.optimizers import FusedSGD
from apex.parallel.LARC import LARC

READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")


class HostReads(TorchDispatchMode):
    """Counts the operators that copy a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in READS
        return func(*args, **(kwargs or {}))


class Toy(nn.Module):
    """Small whole numbers, so that gradients are exact in every dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Small enough for float16 at the first dynamic scale of 2**16.
        return (F.linear(x, self.weight).float() * self.gain).sum() * 2.0**-12


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
KINDS = {"fused": {"fused": True}, "capturable": {"capturable": True}}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU, which has the same kernels, as an accelerator."""
    monkeypatch.setattr(_device_skip, "_on_accelerator", lambda tensor: True)
    for name, module in tuple(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            monkeypatch.setattr(
                module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"]
            )


def backward(model: nn.Module, optimizer: Any, loss_id: int = 0, bad: bool = False) -> None:
    with amp.scale_loss(model(X), optimizer, loss_id=loss_id) as scaled:
        scaled.backward()
        if bad:
            model.weight.grad[0, 0] = float("inf")


def iterate(model: nn.Module, optimizer: Any, bad: bool = False) -> None:
    backward(model, optimizer, bad=bad)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("larc", [False, True])
@pytest.mark.parametrize(
    ("level", "options", "reads"),
    [
        ("O1", {}, 1),
        ("O2", {}, 1),
        ("O2", {"loss_scale": 128.0}, 0),
        ("O1", {"loss_scale": 1.0}, 0),
        ("O2-bf16", {}, 0),
    ],
)
def test_iteration_reads_one_value_for_a_dynamic_scale_and_none_for_a_static_one(
    level: str, options: dict, reads: int, larc: bool
) -> None:
    model = Toy()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if larc:
        optimizer = LARC(optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    iterate(model, optimizer)
    with HostReads() as counter:
        for _ in range(3):
            iterate(model, optimizer)
    assert counter.count == 3 * reads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_iteration_reads_nothing_with_optimizers_that_skip_on_the_device(
    level: str, kind: str, accelerator: None
) -> None:
    model = Toy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **KINDS[kind])
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    iterate(model, optimizer)  # the first step creates the state
    with HostReads() as counter:
        for bad in (False, True, False):
            iterate(model, optimizer, bad)
    assert counter.count == 0
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15


@pytest.mark.parametrize("larc", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "NAdam"])
def test_capturable_optimizer_skip_leaves_everything_as_it_was(
    name: str, level: str, larc: bool, accelerator: None
) -> None:
    model = Toy()
    optimizer: Any = getattr(torch.optim, name)(
        model.parameters(), lr=0.01, eps=2.0**-10, capturable=True
    )
    if larc:
        optimizer = LARC(optimizer)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic"
    )

    def everything() -> list[torch.Tensor]:
        tensors = [*model.parameters(), *amp.master_params(optimizer)]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value)]
        return [tensor.detach().clone() for tensor in tensors]

    iterate(model, optimizer, bad=True)  # without state, the host skips the step
    assert all(not state for state in optimizer.state.values())
    iterate(model, optimizer)
    before = everything()
    iterate(model, optimizer, bad=True)
    after = everything()
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    iterate(model, optimizer)
    assert all(tensor.isfinite().all() for tensor in everything())
    assert not torch.equal(before[0], model.weight)
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**14


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fused_optimizer_on_accelerator_skips_without_the_host(
    level: str, accelerator: None
) -> None:
    model, plain = Toy(), Toy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, num_losses=2)
    step = optimizer.step
    for iteration in range(5):
        bad = iteration in (0, 2)
        # The overflow of the first loss must survive the clean second loss.
        backward(model, optimizer, bad=bad)
        backward(model, optimizer, loss_id=1)
        assert optimizer.step == step, "the host decided"
        optimizer.step()
        optimizer.zero_grad()
        if not bad:
            with amp.disable_casts():
                (plain(X) + plain(X)).backward()
            reference.step()
            reference.zero_grad()
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**14
    assert _amp_state.loss_scalers[1].loss_scale() == 2.0**16
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-3, atol=2e-3)
    if level == "O1":
        assert all(state["step"] == 3 for state in optimizer.state.values())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [FusedSGD, functools.partial(torch.optim.SGD, fused=True)])
def test_fused_sgd_overflow_in_the_first_step_leaves_no_momentum_behind(
    make: Any, level: str, accelerator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Uninitialized memory is often zero by chance.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        model = Toy()
        optimizer = make(model.parameters(), lr=0.01, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for bad in (True, False, False, True, False):
            iterate(model, optimizer, bad)
        assert all(p.isfinite().all() for p in model.parameters())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation_overflow_on_the_device_counts_once(
    level: str, kind: str, accelerator: None
) -> None:
    model = Toy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **KINDS[kind])
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    iterate(model, optimizer)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    with HostReads() as counter:
        for bad in (True, False, False):
            backward(model, optimizer, bad=bad)
        optimizer.step()
    assert counter.count == 0
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15
    assert all(map(torch.equal, before, amp.master_params(optimizer)))


def test_skips_on_device_needs_fused_kernels_and_an_accelerator() -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0)
    assert not _overflow.skips_on_device([optimizer._amp_stash])
    meta = nn.Parameter(torch.ones(2, device="meta"))
    fused = torch.optim.SGD([meta], lr=0.1)
    fused._step_supports_amp_scaling = True
    fused._amp_stash = type(optimizer._amp_stash)(fused, False)
    assert _overflow.skips_on_device([fused._amp_stash])
    assert not _overflow.skips_on_device([fused._amp_stash, optimizer._amp_stash])
