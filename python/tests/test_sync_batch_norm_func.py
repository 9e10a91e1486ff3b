# SPDX-License-Identifier: BSD-3-Clause
"""Transforms of torch.func and forward-mode derivatives: torch's batch norm in evaluation and on
one rank, and an error that names an alternative on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ddp_support import check, on_ranks, raises
from torch import Tensor, nn
from torch.func import grad, hessian, jvp, vmap

from apex.parallel import SyncBatchNorm

Module = Callable[[Tensor], Tensor]
X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DX = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
XS = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _cube(module: Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x).pow(3).sum()


def _forward_mode(module: Module) -> Tensor:
    with forward_ad.dual_level():
        y = module(forward_ad.make_dual(X, DX))
        return torch.stack([*forward_ad.unpack_dual(y)])


def _batched_gradients(module: Module) -> Tensor:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(module(x), x, XS, is_grads_batched=True)[0]


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: grad(_cube(m))(X),
    "jvp": lambda m: jvp(m, (X,), (DX,)),
    "vmap": lambda m: vmap(m)(XS),
    "hessian": lambda m: hessian(_cube(m))(X),
    "forward_mode": _forward_mode,
    "batched_gradients": _batched_gradients,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("training", "track"), [(True, False), (False, True)])
def test_transform_equals_torchs(name: str, training: bool, track: bool) -> None:
    options: Any = {"track_running_stats": track, "dtype": torch.float64}
    ours, theirs = SyncBatchNorm(3, **options), nn.BatchNorm1d(3, **options)
    got, want = (TRANSFORMS[name](module.train(training)) for module in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.processes
@on_ranks(2)
def test_transform_on_several_ranks_is_refused_with_the_way_that_works(
    rank: int, world: int
) -> None:
    module = SyncBatchNorm(3, track_running_stats=False, dtype=torch.float64)
    for name in TRANSFORMS:
        if name != "batched_gradients":
            remedy = "torch.autograd.grad, which support derivatives of any order"
            with raises(NotImplementedError, "several ranks", remedy):
                TRANSFORMS[name](module)
    # The alternatives in the message work, and no rank waits for another.
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(_cube(module)(x), x, create_graph=True)
    dx.square().sum().backward()
    check(x.grad is not None, "no second derivative")
    # Gradients of several vectors are one backward after the other.
    gradients = [torch.autograd.grad(module(x), x, dy)[0] for dy in XS]
    torch.testing.assert_close(_batched_gradients(module), torch.stack(gradients))
    alone = SyncBatchNorm(3, dtype=torch.float64).eval()
    want = nn.BatchNorm1d(3, dtype=torch.float64).eval()
    for transform in TRANSFORMS.values():
        torch.testing.assert_close(transform(alone), transform(want), rtol=1e-9, atol=1e-9)
