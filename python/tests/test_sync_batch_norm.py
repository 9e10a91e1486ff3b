# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm and its operators in one process: plain batch norm in every layout and dtype."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ddp_support import check, on_ranks, raises
from sync_batch_norm_support import (
    OperatorBatchNorm,
    device,  # noqa: F401  (a fixture)
    draw,
    reference_batch_norm,
)
from torch import Tensor, nn
from torch.func import grad, hessian, jvp, vmap
from torch.library import opcheck

from apex.parallel import SyncBatchNorm

OPS = torch.ops.apex


def _inputs(shape: list[int], dtype: torch.dtype, channels: int, seed: int = 0) -> list[Tensor]:
    """x, weight and bias, all requiring gradients."""
    generator = torch.Generator().manual_seed(seed)
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = [(shape, dtype), ([channels], parameter_dtype), ([channels], parameter_dtype)]
    return [draw(size, to, generator).requires_grad_() for size, to in sizes]


def _normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    output: Tensor = OPS.sync_batch_norm(x, weight, bias, None, None, None, 0.1, eps, "")[0]
    return output


def _reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return reference_batch_norm(x, None, weight, bias, eps, False, False)[0]


def _torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("dtype", "multiple", "mean"),
    [(torch.bfloat16, 4e3, 0), (torch.float16, 4e3, 0), (torch.float32, 0, 1e3)],
)
def test_operator_terms_of_a_gradient_that_cancel_are_not_rounded(
    dtype: torch.dtype, multiple: float, mean: float
) -> None:
    """A gradient that is nearly a multiple of the input, or nearly constant: the oracle is torch's
    own layer beside float64."""
    x = torch.randn(16, 64, 4, 4) * 1e-2
    dy = (multiple * x + torch.randn_like(x) + mean).to(dtype)
    weight, bias = torch.full([64], 4.0), torch.zeros(64)
    grads = []
    for cast, layer in ((dtype, _normalize), (dtype, _torch), (torch.float64, _reference)):
        leaf = x.to(dtype).to(cast).requires_grad_()
        parameters = [p if cast == dtype else p.double() for p in (weight, bias)]
        grads += torch.autograd.grad(layer(leaf, *parameters, 1e-5), leaf, dy.to(cast))
    ours, torchs = ((grad.double() - grads[2]).square().mean().sqrt() for grad in grads[:2])
    assert ours <= 1.25 * torchs


@pytest.mark.usefixtures("device")
def test_operator_third_derivative_matches_numeric() -> None:
    x, weight, bias = _inputs([3, 2], torch.float64, 2, seed=1)

    def first(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = _normalize(x, weight, bias, 1e-2)
        return torch.autograd.grad((y**3).sum(), x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(first, (x, weight, bias))


@pytest.mark.usefixtures("device")
def test_operator_keeps_the_memory_format() -> None:
    for shape, memory_format in [
        ((2, 3, 4, 5), torch.channels_last),
        ((2, 3, 2, 4, 5), torch.channels_last_3d),
    ]:
        x = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
        y = _normalize(x, None, None, 1e-5)
        assert y.is_contiguous(memory_format=memory_format)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        assert dx.is_contiguous(memory_format=memory_format)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_operator_value_that_is_not_finite_spoils_its_channel_only(value: float) -> None:
    x = torch.randn(4, 3, 5)
    x[0, 0, 0] = value
    y = _normalize(x, None, None, 1e-5)
    want = torch.nn.functional.batch_norm(x, None, None, training=True)
    assert y[:, 0].isnan().all()
    torch.testing.assert_close(y[:, 1:], want[:, 1:])


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_wrong_input_raises() -> None:
    module = SyncBatchNorm(4)
    with pytest.raises(ValueError, match="at least 2D input"):
        module(torch.randn(4))
    with pytest.raises((ValueError, RuntimeError), match="should contain|one value per channel"):
        module(torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match="z is"):
        module.eval()(torch.randn(2, 4, 5), torch.randn(2, 4, 6))
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*torch.Size\(\[1, 4\]\)"):
        module.train()(torch.randn(1, 4))
    with pytest.raises(RuntimeError, match="no process group is registered as 'gone'"):
        OPS.sync_batch_norm(torch.randn(2, 4), None, None, None, None, None, 0.1, 1e-5, "gone")


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_copies_and_pickles() -> None:
    module = SyncBatchNorm(4, momentum=None, channel_last=True, fuse_relu=True)
    x = torch.randn(3, 5, 4)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(x), module(x))
        assert twin.channel_last and twin.fuse_relu and twin.process_group is None
    assert "fuse_relu=True" in repr(module)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_operators_pass_opcheck(memory_format: torch.memory_format) -> None:
    x, weight, bias = _inputs([2, 5, 3, 2], torch.float32, 5)
    x = x.detach().to(memory_format=memory_format).requires_grad_()
    statistics = (torch.zeros(5), torch.ones(5))
    forward = (x, weight, bias, *statistics, torch.tensor(0), 0.1, 1e-5, "")
    opcheck(OPS.sync_batch_norm, forward)
    with torch.no_grad():
        y, mean, invstd, count = OPS.sync_batch_norm(*forward)
    for needs in ([True, True, True], [False, True, False]):
        arguments = (torch.randn_like(y), x.detach(), weight.detach(), mean, invstd, count)
        opcheck(OPS.sync_batch_norm_backward, (*arguments, needs, ""))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sync_batch_norm_compiled_fullgraph_matches_eager(backend: str) -> None:
    eager, module = OperatorBatchNorm(5), OperatorBatchNorm(5)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for step in range(2):
        x = torch.randn(4 + step, 5, 3, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        torch.testing.assert_close(compiled(x), eager(other))
        compiled(x).square().sum().backward()
        eager(other).square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(dict(module.state_dict()), dict(eager.state_dict()))
    plain = SyncBatchNorm(5, fuse_relu=True)
    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    for training in (True, False):
        plain.train(training)
        torch.testing.assert_close(compiled(x), plain(x))


@pytest.mark.usefixtures("device")
def test_running_statistics_versions_move_once_per_batch() -> None:
    module = OperatorBatchNorm(4)
    buffers = [module.running_mean, module.running_var, module.num_batches_tracked]
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        before = [buffer._version for buffer in buffers]
        with mode():
            module(torch.randn(2, 4))
        assert [buffer._version for buffer in buffers] == [version + 1 for version in before]


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
