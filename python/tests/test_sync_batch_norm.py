# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm in one process: plain batch norm in every mode, layout and dtype."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys

import pytest
import torch
from sync_batch_norm_support import (
    TOLERANCE,
    CutGradient,
    assert_near,
    device,  # noqa: F401  (a fixture)
    draw,
    reference_batch_norm,
)
from torch import Tensor
from torch.library import opcheck

from apex.parallel import SyncBatchNorm

OPS = torch.ops.apex


def _inputs(shape: list[int], dtype: torch.dtype, channels: int, seed: int = 0) -> list[Tensor]:
    """x, z, weight and bias, all requiring gradients."""
    generator = torch.Generator().manual_seed(seed)
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = [
        (shape, dtype),
        (shape, dtype),
        ([channels], parameter_dtype),
        ([channels], parameter_dtype),
    ]
    return [draw(size, to, generator).requires_grad_() for size, to in sizes]


# Planes shorter than a vector, not a multiple of one, and longer than a chunk; odd channel counts.
SHAPES = [
    (4, 3, 1),
    (3, 5, 7, 7),
    (2, 70, 3, 3),
    (2, 3, 4100),
    (2, 2, 3, 64, 64),
    (300, 33),
    (7, 1),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sync_batch_norm_training_matches_float64(shape: tuple, dtype: torch.dtype) -> None:
    for channel_last, relu, add in itertools.product([False, True], repeat=3):
        sizes = list(shape)
        channels = sizes[1]
        if channel_last:
            sizes = [sizes[0], *sizes[2:], channels]
        x, z, weight, bias = _inputs(sizes, dtype, channels)
        added = z if add else None
        leaves = [x, weight, bias] + ([z] if add else [])
        doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias, z)]
        args = (doubles[0], doubles[3] if add else None, doubles[1], doubles[2], 1e-5, channel_last)
        before_relu = reference_batch_norm(*args, False)[0].detach()
        dy = torch.randn(sizes).to(dtype) * (before_relu.abs() > 0.05)
        y = OPS.sync_batch_norm(
            x, added, weight, bias, None, None, None, 0.1, 1e-5, channel_last, relu, ""
        )[0]
        want = reference_batch_norm(*args, relu)[0]
        assert_near(y, want, dtype, "output")
        grads = torch.autograd.grad(y, leaves, dy)
        wants = torch.autograd.grad(want, doubles[: len(leaves)], dy.double())
        for index, (got, expected) in enumerate(zip(grads, wants, strict=True)):
            assert got.dtype == leaves[index].dtype
            assert_near(got, expected, dtype, f"gradient {index}")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("momentum", [None, 0.0, 0.25])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 2, 3), (4, 3, 2, 2, 2)], ids=str)
def test_sync_batch_norm_modes_match_torch(
    shape: tuple, momentum: float | None, track: bool, affine: bool
) -> None:
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
    plain = kind.get(len(shape), torch.nn.BatchNorm3d)(
        3, eps=1e-3, momentum=momentum, affine=affine, track_running_stats=track
    )
    module = SyncBatchNorm(3, 1e-3, momentum, affine, track)
    for training in [True, True, False, True, False]:
        plain.train(training)
        module.train(training)
        x = torch.randn(shape, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        torch.testing.assert_close(module(x), plain(other))
        dy = torch.randn(shape)
        module(x).backward(dy)
        plain(other).backward(dy)
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()))
    torch.testing.assert_close(
        [p.grad for p in module.parameters()],
        [p.grad for p in plain.parameters()],
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [False, True])
def test_sync_batch_norm_gradcheck_first_and_second(
    training: bool, relu: bool, channel_last: bool
) -> None:
    shape = [3, 2, 2, 3] if channel_last else [3, 3, 2, 2]
    x, z, weight, bias = _inputs(shape, torch.float64, 3, seed=4)
    mean, var = torch.randn(3).double(), torch.rand(3).double() + 0.5

    def call(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        if training:
            return OPS.sync_batch_norm(
                x, z, weight, bias, None, None, None, 0.1, 1e-2, channel_last, relu, ""
            )[0]
        return OPS.batch_norm_inference(x, z, weight, bias, mean, var, 1e-2, channel_last, relu)

    def without_z(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return call(x, None, weight, bias)

    assert torch.autograd.gradcheck(call, (x, z, weight, bias))
    assert torch.autograd.gradgradcheck(call, (x, z, weight, bias))
    assert torch.autograd.gradgradcheck(without_z, (x, weight, bias))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("asked", ["w", "b", "z", "x", "wb", "wz", "xw", "xwbz"])
def test_sync_batch_norm_second_derivative_of_what_was_asked_for(
    asked: str, add: bool, relu: bool
) -> None:
    """As in a gradient penalty on parameters: the inputs of the first derivative do not determine
    those of the second one. The reference is autograd through plain operators."""
    if "z" in asked and not add:
        pytest.skip("nothing is added")
    x, z, weight, bias = _inputs([6, 3, 4], torch.float64, 3, seed=7)
    leaves = {"x": x, "w": weight, "b": bias} | ({"z": z} if add else {})
    added = z if add else None

    def penalty(y: Tensor) -> list[Tensor | None]:
        first = torch.autograd.grad(
            y.pow(3).sum(), [leaves[name] for name in asked], create_graph=True
        )
        return list(
            torch.autograd.grad(
                sum(grad.square().sum() for grad in first), list(leaves.values()), allow_unused=True
            )
        )

    y = OPS.sync_batch_norm(x, added, weight, bias, None, None, None, 0.1, 1e-2, False, relu, "")[0]
    want = penalty(reference_batch_norm(x, added, weight, bias, 1e-2, False, relu)[0])
    for name, got, expected in zip(leaves, penalty(y), want, strict=True):
        expected = torch.zeros_like(leaves[name]) if expected is None else expected
        got = torch.zeros_like(leaves[name]) if got is None else got
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8, msg=f"second, of {name}")


@pytest.mark.parametrize(
    "name", ["z", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
)
def test_sync_batch_norm_argument_on_another_device_is_refused(name: str) -> None:
    # On the meta device it determines which kernel is called, and could return uninitialized
    # memory.
    x = torch.randn(4, 3, 5)
    arguments = {
        "z": torch.randn(4, 3, 5),
        "weight": torch.ones(3),
        "bias": torch.zeros(3),
        "running_mean": torch.zeros(3),
        "running_var": torch.ones(3),
        "num_batches_tracked": torch.tensor(0),
    }
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} is on meta but the input on cpu"):
        OPS.sync_batch_norm(x, *arguments.values(), 0.1, 1e-5, False, False, "")
    if name != "num_batches_tracked":
        five = list(arguments.values())[:5]
        with pytest.raises(ValueError, match=f"{name} is on meta"):
            OPS.batch_norm_inference(x, *five, 1e-5, False, False)


@pytest.mark.parametrize("counter", [torch.zeros(0, dtype=torch.int64), torch.zeros(2).long()])
def test_sync_batch_norm_counter_of_another_size_is_refused(counter: Tensor) -> None:
    with pytest.raises(ValueError, match="num_batches_tracked .* must be a tensor with one number"):
        OPS.sync_batch_norm(
            torch.randn(4, 3), None, None, None, torch.zeros(3), torch.ones(3), counter,
            None, 1e-5, False, False, "",
        )  # fmt: skip


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_third_derivative_matches_numeric() -> None:
    x, _, weight, bias = _inputs([3, 2], torch.float64, 2, seed=1)

    def first(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = OPS.sync_batch_norm(
            x, None, weight, bias, None, None, None, 0.1, 1e-2, False, False, ""
        )[0]
        return torch.autograd.grad((y**3).sum(), x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(first, (x, weight, bias))


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_large_mean_keeps_float64_accuracy() -> None:
    # Mean 1e4, standard deviation 1: what remains is the rounding of the input and of the output.
    for channel_last in (False, True):
        shape = (64, 33, 33, 8) if channel_last else (64, 8, 33, 33)
        x = (torch.randn(shape, dtype=torch.float64) + 1e4).float()
        y, mean, invstd, count = OPS.sync_batch_norm(
            x, None, None, None, None, None, None, 0.1, 0.0, channel_last, False, ""
        )
        want, want_mean, want_var = reference_batch_norm(
            x.double(), None, None, None, 0.0, channel_last, False
        )
        assert ((mean - want_mean).abs() / want_mean).max() < 1e-11
        assert ((invstd**-2 - want_var).abs() / want_var).max() < 1e-6
        assert (y - want).abs().max() < 2e-6
        assert int(count) == 64 * 33 * 33


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_memory_format_is_kept_without_a_copy() -> None:
    for shape, memory_format in [
        ((2, 3, 4, 5), torch.channels_last),
        ((2, 3, 2, 4, 5), torch.channels_last_3d),
    ]:
        x = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
        module = SyncBatchNorm(3)
        y = module(x)
        assert y.is_contiguous(memory_format=memory_format)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        assert dx.is_contiguous(memory_format=memory_format)
        with torch.profiler.profile() as profile:
            module(x)
        copies = {"aten::copy_", "aten::clone", "aten::contiguous"}
        assert not copies & {event.name for event in profile.events()}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("needs_input", [False, True])
def test_sync_batch_norm_backward_makes_nothing_but_its_results(
    needs_input: bool, training: bool
) -> None:
    # Each of these would be a launch on a GPU. Earlier versions computed gradients of the
    # statistics, and in evaluation converted the running variance to a standard deviation.
    x = torch.randn(4, 3, 5, requires_grad=needs_input)
    y = SyncBatchNorm(3).train(training)(x)
    dy = torch.randn_like(y)
    with torch.profiler.profile() as profile:
        y.backward(dy)
    operators = {e.name for e in profile.events() if e.name.startswith(("aten::", "apex::"))}
    assert operators <= {
        "apex::sync_batch_norm_backward",
        "aten::empty",
        "aten::to",
        "aten::detach",
    }


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_no_gradient_arrives_gives_zeros() -> None:
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 4, 4).to(memory_format=memory_format).requires_grad_()
        z = torch.randn_like(x).requires_grad_()
        module = SyncBatchNorm(3)
        CutGradient.apply(module(x, z), True).sum().backward()
        for tensor in (x, z, module.weight, module.bias):
            assert tensor.grad is not None and not tensor.grad.any()


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_strided_input_is_right() -> None:
    base = torch.randn(4, 6, 5, 7, requires_grad=True)
    x = base[:, ::2, :, 1:].transpose(2, 3)
    y = SyncBatchNorm(3)(x)
    want = reference_batch_norm(x.double(), None, None, None, 1e-5, False, False)[0]
    assert_near(y, want, torch.float32, "output")
    (got,) = torch.autograd.grad((y**3).sum(), base)
    (expected,) = torch.autograd.grad((want**3).sum(), base)
    assert_near(got, expected, torch.float32, "gradient")


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_half_input_with_float32_parameters() -> None:
    module = SyncBatchNorm(4)
    y = module(torch.randn(3, 4, 5, dtype=torch.float16))
    assert y.dtype == torch.float16
    y.float().square().sum().backward()
    assert module.weight.grad.dtype == torch.float32
    half = SyncBatchNorm(4, dtype=torch.bfloat16)
    assert half(torch.randn(3, 4, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_wrong_input_raises_value_error() -> None:
    module = SyncBatchNorm(4)
    with pytest.raises(ValueError, match="at least 2D input"):
        module(torch.randn(4))
    with pytest.raises(ValueError, match="one value per channel"):
        module(torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match="z is"):
        module(torch.randn(2, 4, 5), torch.randn(2, 4, 6))
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*torch.Size\(\[1, 4\]\)"):
        module(torch.randn(1, 4))
    with pytest.raises(TypeError, match="float64"):
        module(torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="no process group is registered as 'gone'"):
        OPS.sync_batch_norm(
            torch.randn(2, 4), None, None, None, None, None, None, 0.1, 1e-5, False, False, "gone"
        )
    assert int(module.num_batches_tracked) == 0


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_running_statistics_changed_before_backward_is_noticed() -> None:
    module = SyncBatchNorm(4)
    module.eval()
    y = module(torch.randn(2, 4, requires_grad=True))
    module.train()
    module(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("training", [True, False])
def test_sync_batch_norm_output_changed_in_place_is_noticed_where_it_is_needed(
    training: bool,
) -> None:
    module = SyncBatchNorm(4, fuse_relu=True).train(training)
    y = module(torch.randn(3, 4, requires_grad=True), torch.randn(3, 4))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = module(torch.randn(3, 4, requires_grad=True))  # without z, the input is enough
    y.mul_(2)
    y.sum().backward()


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_inference_mode_and_no_grad_work() -> None:
    module = SyncBatchNorm(4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not module(torch.randn(2, 4)).requires_grad
            other = SyncBatchNorm(4)
            other(torch.randn(2, 4))
            assert int(other.num_batches_tracked) == 1


@pytest.mark.usefixtures("device")
def test_sync_batch_norm_copies_and_pickles() -> None:
    module = SyncBatchNorm(4, momentum=None, channel_last=True, fuse_relu=True)
    x = torch.randn(3, 5, 4)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(x), module(x))
        assert twin.channel_last and twin.fuse_relu and twin.process_group is None
    assert "fuse_relu=True" in repr(module)


def _operator_arguments() -> list[tuple]:
    cases = []
    for channel_last, relu, add, memory_format in [
        (False, False, False, torch.contiguous_format),
        (False, True, True, torch.channels_last),
        (True, True, False, torch.contiguous_format),
    ]:
        shape = [2, 3, 2, 5] if channel_last else [2, 5, 3, 2]
        x, z, weight, bias = _inputs(shape, torch.float32, 5)
        x = x.detach().to(memory_format=memory_format).requires_grad_()
        cases.append((x, z if add else None, weight, bias, channel_last, relu))
    return cases


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("index", range(3))
def test_sync_batch_norm_operators_pass_opcheck(index: int) -> None:
    x, z, weight, bias, channel_last, relu = _operator_arguments()[index]
    statistics = (torch.zeros(5), torch.ones(5))
    forward = (x, z, weight, bias, *statistics, torch.tensor(0), 0.1, 1e-5, channel_last, relu, "")
    opcheck(OPS.sync_batch_norm, forward)
    opcheck(OPS.batch_norm_inference, (x, z, weight, bias, *statistics, 1e-5, channel_last, relu))
    y, mean, invstd, count = OPS.sync_batch_norm(*forward)
    output = y.detach() if relu and z is not None else None
    needs = [True, z is not None, True, True]
    opcheck(
        OPS.sync_batch_norm_backward,
        (torch.randn_like(y), x, output, weight, bias, mean.detach(), invstd.detach(), count, 1e-5,
         channel_last, relu, needs, ""),
    )  # fmt: skip
    opcheck(
        OPS.sync_batch_norm_backward,
        (torch.randn_like(y), x, output, weight, bias, *statistics, None, 1e-5, channel_last, relu,
         needs, ""),
    )  # fmt: skip
    opcheck(OPS.all_reduce_sum, (torch.randn(3, requires_grad=True), ""))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sync_batch_norm_compiled_fullgraph_matches_eager(backend: str) -> None:
    eager = SyncBatchNorm(5, fuse_relu=True)
    module = SyncBatchNorm(5, fuse_relu=True)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for step in range(2):
        x = torch.randn(4 + step, 5, 3, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        torch.testing.assert_close(compiled(x), eager(other))
        compiled(x).square().sum().backward()
        eager(other).square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(dict(module.state_dict()), dict(eager.state_dict()))
    module.eval()
    eager.eval()
    torch.testing.assert_close(compiled(x), eager(x))


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_sync_batch_norm_other_instruction_sets_are_right(capability: str) -> None:
    # torch selects its instruction set when it is loaded, so each one runs in a separate process.
    environment = {"ATEN_CPU_CAPABILITY": capability}
    test = f"{__file__}::test_sync_batch_norm_training_matches_float64"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
