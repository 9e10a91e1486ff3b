# SPDX-License-Identifier: BSD-3-Clause
"""LARC compared with a simple float64 reference, and combined with other optimizers."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from amp_support import Calls
from torch import nn

from apex.parallel.LARC import LARC

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]


def reference_step(
    params: list[list[float]], grads: list[list[float]], lr: float, decay: float, **larc: Any
) -> list[list[float]]:
    """One LARC + SGD step on plain numbers, element by element."""
    result = []
    for p, g in zip(params, grads, strict=True):
        p_norm = math.sqrt(sum(x * x for x in p))
        g_norm = math.sqrt(sum(x * x for x in g))
        if p_norm == 0 or g_norm == 0:
            result.append([x - lr * y for x, y in zip(p, g, strict=True)])
            continue
        local = larc["trust"] * p_norm / (g_norm + p_norm * decay + larc["eps"])
        factor = min(local / lr, 1) if larc["clip"] else local
        result.append([x - lr * (y + decay * x) * factor for x, y in zip(p, g, strict=True)])
    return result


def random_params(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in SHAPES
    ]


def set_grads(params: list[nn.Parameter], seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        values = torch.randn(param.shape, generator=generator, dtype=torch.float64) * size
        param.grad = values.to(param.dtype)


def flat(tensors: Any) -> list[list[float]]:
    return [tensor.detach().double().reshape(-1).tolist() for tensor in tensors]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("trust, eps", [(0.02, 1e-8), (0.5, 1e-2)])
def test_step_matches_scalar_reference(
    trust: float, eps: float, size: float, decay: float, clip: bool, dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    params = random_params(dtype)
    optimizer = LARC(
        torch.optim.SGD(params, lr=0.1, weight_decay=decay),
        trust_coefficient=trust,
        clip=clip,
        eps=eps,
    )
    for step in range(3):
        set_grads(params, step, size)
        want = reference_step(
            flat(params), flat(p.grad for p in params), 0.1, decay, trust=trust, eps=eps, clip=clip
        )
        optimizer.step()
        for mine, numbers in zip(flat(params), want, strict=True):
            assert mine == pytest.approx(numbers, rel=tolerance, abs=tolerance)


def test_maximizing_decays_like_minimizing_the_negative() -> None:
    up, down = random_params(torch.float64), random_params(torch.float64)
    for params, maximize in ((up, True), (down, False)):
        set_grads(params, 3, 1.0 if maximize else -1.0)
        LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1, maximize=maximize)).step()
    assert all(torch.equal(a, b) for a, b in zip(up, down, strict=True))


def test_step_zero_norms_and_missing_gradients_are_left_alone() -> None:
    zero, without, silent = (nn.Parameter(torch.full((2,), v)) for v in (0.0, 1.0, 1.0))
    optimizer = LARC(torch.optim.SGD([zero, without, silent], lr=0.5, weight_decay=0.1))
    zero.grad, silent.grad = torch.ones(2), torch.zeros(2)
    optimizer.step()
    assert zero.tolist() == [-0.5, -0.5], "a parameter of norm zero takes the plain step"
    assert without.tolist() == silent.tolist() == [1.0, 1.0], "no gradient, no decay"
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_step_groups_with_own_settings_and_mixed_types() -> None:
    first, second = random_params(torch.float32), random_params(torch.float64)
    groups = [
        {"params": first[:2] + second[:1], "lr": 0.1, "weight_decay": 0.1},
        {"params": second[1:], "lr": 0.01},
    ]
    optimizer = LARC(torch.optim.SGD(groups, lr=1.0, weight_decay=0.0))
    everything = [(p, 0.1, 0.1) for p in first[:2] + second[:1]]
    everything += [(p, 0.01, 0.0) for p in second[1:]]
    set_grads([p for p, _, _ in everything], 3, 1.0)
    want = [
        reference_step(flat([p]), flat([p.grad]), lr, decay, trust=0.02, eps=1e-8, clip=True)[0]
        for p, lr, decay in everything
    ]
    optimizer.step()
    for mine, numbers in zip(flat(p for p, _, _ in everything), want, strict=True):
        assert mine == pytest.approx(numbers, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_step_low_precision_norms_do_not_overflow(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.full((1000,), 60.0, dtype=dtype))
    optimizer = LARC(torch.optim.SGD([param], lr=0.1))
    param.grad = torch.full_like(param, 4096.0)  # its squared norm exceeds float16
    optimizer.step()
    assert param.isfinite().all() and (param < 60).all()


@pytest.mark.parametrize("clip", [True, False])
def test_step_uses_multi_tensor_norms_and_copies_nothing_to_the_host(clip: bool) -> None:
    params = random_params(torch.float32)
    optimizer = LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1, foreach=True), clip=clip)
    set_grads(params, 0, 1.0)
    with Calls() as calls:
        optimizer.step()
    assert calls.names["_foreach_norm"] == 2 and calls.names["linalg_vector_norm"] == 0
    assert calls.names["_local_scalar_dense"] == calls.names["nonzero"] == 0


@pytest.mark.parametrize(
    "inner",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    ],
)
def test_larc_is_an_optimizer_to_schedulers_hooks_and_checkpoints(inner: Any) -> None:
    params = random_params(torch.float32)
    optimizer = LARC(inner(params))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optim.param_groups
    assert optimizer.state is optimizer.optim.state
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        ],
        [2],
    )
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    for step in range(3):
        set_grads(params, step, 1.0)
        optimizer.step()
        scheduler.step()
        plateau.step(1.0)
    assert called == ["pre", "post"] * 3
    assert "LARC" in repr(optimizer)

    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    twins = copy.deepcopy(params)
    resumed = LARC(inner(twins))
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for optimizer_, mine in ((optimizer, params), (resumed, twins)):
        set_grads(mine, 9, 1.0)
        optimizer_.step()
    for a, b in zip(params, twins, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copied_or_pickled_larc_steps_its_own_parameters(copier: Any) -> None:
    params = random_params(torch.float32)
    optimizer = LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9), trust_coefficient=0.1)
    set_grads(params, 0, 1.0)
    optimizer.step()
    twin = copier(optimizer)
    twins = twin.param_groups[0]["params"]
    assert twin.trust_coefficient == 0.1
    for one, mine in ((optimizer, params), (twin, twins)):
        set_grads(mine, 1, 1.0)
        one.step()
    for a, b in zip(params, twins, strict=True):
        assert a is not b and torch.equal(a, b)


def test_closure_gradients_are_adapted_after_each_evaluation() -> None:
    params, twins = random_params(torch.float32), random_params(torch.float32)
    optimizer = LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1))
    plain = LARC(torch.optim.SGD(twins, lr=0.1, weight_decay=0.1))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.pow(2).sum() for p in params)
        loss.backward()
        return loss

    want = sum(p.detach().pow(2).sum() for p in twins)
    assert torch.equal(optimizer.step(closure), want)
    sum(p.pow(2).sum() for p in twins).backward()
    plain.step()
    for a, b in zip(params, twins, strict=True):
        assert torch.equal(a, b)


def test_weight_decay_is_restored_when_the_step_raises() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            assert self.param_groups[0]["weight_decay"] == 0
            raise KeyError

    params = random_params(torch.float32)
    optimizer = LARC(Broken(params, lr=0.1, weight_decay=0.25))
    set_grads(params, 0, 1.0)
    with pytest.raises(KeyError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_gradient_it_cannot_adapt_raises_and_changes_nothing(kind: str) -> None:
    dense = nn.Parameter(torch.ones(3))
    other = nn.Parameter(torch.ones(3, dtype=torch.complex64 if kind == "complex" else None))
    optimizer = LARC(torch.optim.SGD([dense, other], lr=0.1, weight_decay=0.5))
    dense.grad = torch.ones(3)
    other.grad = torch.ones_like(other)
    if kind == "sparse":
        other.grad = other.grad.to_sparse()
    with pytest.raises(ValueError, match=f"parameter 1 of group 0 has .*{kind}"):
        optimizer.step()
    assert dense.tolist() == dense.grad.tolist() == [1.0, 1.0, 1.0]
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("option", "value"),
    [(name, value) for name in ("trust_coefficient", "eps") for value in (-1.0, math.inf, math.nan)]
    + [("trust_coefficient", 0.0)],
)
def test_option_out_of_range_raises(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        LARC(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), **{option: value})
    with pytest.raises(TypeError, match="LARC wraps an optimizer, got Linear"):
        LARC(nn.Linear(2, 2))  # type: ignore[arg-type]
