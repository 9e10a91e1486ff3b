# SPDX-License-Identifier: BSD-3-Clause
"""Transforms of torch.func and forward-mode derivatives: the same as torch's batch norm on one
rank, and an error that names an alternative on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ddp_support import RankPool, check, raises
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from apex.parallel import SyncBatchNorm

Module = Callable[[Tensor], Tensor]
X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DX = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
XS = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _cube(module: Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x).pow(3).sum()


def _of_parameters(module: nn.Module) -> dict[str, Tensor]:
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    return grad(lambda p: functional_call(module, p, (X,)).pow(3).sum())(parameters)


def _ensemble(module: nn.Module) -> Tensor:
    """Several models at once, each with its own parameters and buffers."""

    def copies(tensors: Any) -> dict[str, Tensor]:
        return {n: torch.stack([t.detach() * (i + 1) for i in range(4)]) for n, t in tensors}

    parameters, buffers = copies(module.named_parameters()), copies(module.named_buffers())
    y = vmap(lambda p, b, x: functional_call(module, (p, b), (x,)))(parameters, buffers, XS)
    return torch.cat([y.flatten(), *(b.double().flatten() for b in buffers.values())])


def _forward_mode(module: Module) -> Tensor:
    with forward_ad.dual_level():
        y = module(forward_ad.make_dual(X, DX))
        return torch.stack([*forward_ad.unpack_dual(y)])


def _forward_over_reverse(module: Module) -> Tensor:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X.clone().requires_grad_(), DX)
        (dx,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        return forward_ad.unpack_dual(dx).tangent


def _batched_gradients(module: Module) -> Tensor:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(module(x), x, XS, is_grads_batched=True)[0]


def _batched_second_derivatives(module: Module) -> Tensor:
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(dx, x, XS, is_grads_batched=True)[0]


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: grad(_cube(m))(X),
    "grad_of_parameters": _of_parameters,
    "jvp": lambda m: jvp(m, (X,), (DX,)),
    "vmap": lambda m: vmap(m)(XS),
    "vmap_of_grad": lambda m: vmap(grad(_cube(m)))(XS),
    "jacrev": lambda m: jacrev(m)(X),
    "jacfwd": lambda m: jacfwd(m)(X),
    "hessian": lambda m: hessian(_cube(m))(X),
    "ensemble": _ensemble,
    "forward_mode": _forward_mode,
    "forward_over_reverse": _forward_over_reverse,
    "batched_gradients": _batched_gradients,
    "batched_second_derivatives": _batched_second_derivatives,
}
# The transforms that torch's batch norm supports while it updates running statistics.
IN_TRAINING = ("ensemble", "forward_mode", "forward_over_reverse", "batched_gradients",
               "batched_second_derivatives")  # fmt: skip


def _pair(**options: Any) -> tuple[SyncBatchNorm, nn.BatchNorm1d]:
    ours = SyncBatchNorm(3, dtype=torch.float64, **options)
    theirs = nn.BatchNorm1d(3, dtype=torch.float64, **options)
    nn.init.uniform_(ours.weight)
    if ours.running_mean is not None:
        nn.init.uniform_(ours.running_mean)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("training", "track"), [(True, False), (False, True), (False, False)])
def test_transform_equals_torchs(name: str, training: bool, track: bool) -> None:
    ours, theirs = _pair(track_running_stats=track)
    got, want = (TRANSFORMS[name](module.train(training)) for module in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", IN_TRAINING)
def test_transform_that_updates_running_statistics_equals_torchs(name: str) -> None:
    ours, theirs = _pair()
    got, want = (TRANSFORMS[name](module) for module in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_grad_in_training_updates_running_statistics_once() -> None:
    # torch's refuses too. Both work if the buffers are passed as arguments.
    ours, theirs = _pair(momentum=None)
    got = grad(_cube(ours))(X)
    x = X.clone().requires_grad_()
    (want,) = torch.autograd.grad(_cube(theirs)(x), x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_vmap_in_training_over_one_set_of_running_statistics_is_refused() -> None:
    ours, _ = _pair()
    before = ours.running_mean.clone()
    with pytest.raises(RuntimeError, match="running_mean or running_var, which will be updated"):
        vmap(ours)(XS)
    assert torch.equal(ours.running_mean, before)


@pytest.mark.parametrize("training", [True, False])
def test_jvp_with_options_of_ours_equals_torchs_operators(training: bool) -> None:
    ours = SyncBatchNorm(3, channel_last=True, fuse_relu=True, dtype=torch.float64).train(training)
    theirs = nn.BatchNorm1d(3, dtype=torch.float64).train(training)
    x, z, dx, dz = torch.randn(4, 2, 5, 3, dtype=torch.float64).unbind()[:4]

    def want(x: Tensor, z: Tensor) -> Tensor:
        return (theirs(x.movedim(-1, 1)).movedim(1, -1) + z).relu()

    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(*pair) for pair in ((x, dx), (z, dz))]
        torch.testing.assert_close(
            forward_ad.unpack_dual(ours(*dual)), forward_ad.unpack_dual(want(*dual))
        )
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_transforms_leave_ordinary_calls_to_the_kernels() -> None:
    ours, _ = _pair(track_running_stats=False)
    grad(_cube(ours))(X)
    with torch.profiler.profile() as profile:
        ours(X)
    names = {event.name for event in profile.events()}
    assert "aten::native_batch_norm" not in names and "apex::sync_batch_norm" in names


@pytest.mark.parametrize("value", [torch.ones(6, 4), torch.ones(6, 3).long()])
def test_transform_checks_its_arguments(value: Tensor) -> None:
    module = SyncBatchNorm(3)
    with pytest.raises((ValueError, TypeError), match="apex sync batch norm"):
        vmap(module)(value.expand(4, *value.shape))


def test_forward_mode_around_the_backward_alone_is_refused_with_the_way_that_works() -> None:
    x = X.clone().requires_grad_()
    y = _pair()[0](x)
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(X, DX)
        with pytest.raises(NotImplementedError, match="call the module inside the transform"):
            torch.autograd.grad(y, x, dy)


def _on_two_ranks(rank: int, world: int) -> None:
    module = SyncBatchNorm(3, track_running_stats=False, dtype=torch.float64)
    for name in ("grad", "jvp", "vmap", "forward_mode"):
        remedy = "torch.autograd.grad, which support derivatives of any order"
        with raises(NotImplementedError, "several ranks", remedy):
            TRANSFORMS[name](module)
    # The alternatives in the message work, and no rank waits for another.
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(_cube(module)(x), x, create_graph=True)
    dx.square().sum().backward()
    alone = SyncBatchNorm(3, dtype=torch.float64).eval()
    want = nn.BatchNorm1d(3, dtype=torch.float64).eval()
    for name in ("grad", "jvp", "vmap", "forward_mode", "hessian"):
        got, expected = TRANSFORMS[name](alone), TRANSFORMS[name](want)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    check(x.grad is not None, "no second derivative")


@pytest.mark.processes
def test_transform_on_several_ranks_is_refused_with_the_way_that_works(ranks: RankPool) -> None:
    ranks.run(2, _on_two_ranks)
