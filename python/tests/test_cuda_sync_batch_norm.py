# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm on CUDA in one process: its launches, and no host synchronization.

test_sync_batch_norm.py tests its results, together with the CPU's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from sync_batch_norm_support import assert_near, reference_batch_norm
from torch import Tensor, nn

from apex.parallel import SyncBatchNorm

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

OPS = torch.ops.apex


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def _kernels(body: Callable[[], object]) -> list[str]:
    """The names of the kernels and memory operations that ``body`` launches on the GPU, in
    order."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        body()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def _expect_kernels(found: list[str], *parts: str) -> None:
    assert len(found) == len(parts), found
    for name, part in zip(found, parts, strict=True):
        assert part in name


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_step_takes_two_launches_per_direction(memory_format: torch.memory_format) -> None:
    module = SyncBatchNorm(16)
    x = torch.randn(8, 16, 12, 12).to(memory_format=memory_format).requires_grad_()
    dy = torch.randn_like(x)
    module(x).backward(dy)  # the first call creates cached objects
    if not _kernels(lambda: torch.ones(3) + 1):
        pytest.skip("the profiler records no kernels here")
    outputs: list[Tensor] = []
    _expect_kernels(
        _kernels(lambda: outputs.append(module(x))), "statistics_kernel", "normalize_kernel"
    )
    inputs = [x, module.weight, module.bias]
    _expect_kernels(
        _kernels(lambda: torch.autograd.grad(outputs[0], inputs, dy)),
        "reduce_kernel",
        "gradient_kernel",
    )


def test_large_mean_keeps_float64_accuracy() -> None:
    # Mean 1e4, standard deviation 1: what remains is the rounding of the input and of the output.
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = (torch.randn(64, 8, 33, 33, dtype=torch.float64) + 1e4).float()
        x = x.to(memory_format=memory_format)
        y, mean, invstd, count = OPS.sync_batch_norm(x, None, None, None, None, None, 0.1, 0.0, "")
        want, want_mean, want_var = reference_batch_norm(
            x.double(), None, None, None, 0.0, False, False
        )
        assert ((mean - want_mean).abs() / want_mean).max() < 1e-11
        assert ((invstd**-2 - want_var).abs() / want_var).max() < 1e-6
        assert (y - want).abs().max() < 2e-6
        assert int(count) == 64 * 33 * 33


def test_step_never_waits_on_the_host() -> None:
    module = SyncBatchNorm(16, momentum=None)
    x = torch.randn(8, 16, 12, 12, requires_grad=True)
    dy = torch.randn_like(x)
    module(x).backward(dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x).backward(dy)  # raises if anything waits for the GPU
        module(x[:0]).backward(dy[:0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channel_last", [False, True])
def test_step_unaligned_memory_is_right(channel_last: bool, dtype: torch.dtype) -> None:
    # The address is one element past a 16-byte boundary, although the sizes would allow 16-byte
    # loads.
    shape = (6, 8, 10, 16) if channel_last else (6, 16, 8, 10)
    count = 6 * 16 * 8 * 10
    x = torch.randn(count + 1, dtype=torch.float64).to(dtype)[1:].view(shape).requires_grad_()
    dy = torch.randn(count + 1, dtype=torch.float64).to(dtype)[1:].view(shape)
    y = SyncBatchNorm(16, channel_last=channel_last)(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    double = x.detach().double().requires_grad_()
    want = reference_batch_norm(double, None, None, None, 1e-5, channel_last, False)[0]
    (dx_want,) = torch.autograd.grad(want, double, dy.double())
    assert_near(y, want, dtype, "output")
    assert_near(dx, dx_want, dtype, "gradient")


@pytest.mark.parametrize("channel_last", [False, True])
@pytest.mark.parametrize("shape", [(32, 2048, 7, 7), (256, 64, 56, 56), (4, 3, 500, 500)], ids=str)
def test_step_large_inputs_of_many_blocks_are_right(shape: tuple, channel_last: bool) -> None:
    x = (torch.randn(shape) * 3 + 7).half()
    if channel_last:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    dy = torch.randn_like(x)
    module = SyncBatchNorm(shape[1])
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    double = x.detach().double().requires_grad_()
    want = reference_batch_norm(double, None, None, None, 1e-5, False, False)[0]
    (dx_want,) = torch.autograd.grad(want, double, dy.double())
    assert_near(y, want, torch.float16, "output")
    assert_near(dx, dx_want, torch.float16, "gradient")


def test_step_two_streams_at_once_do_not_disturb_each_other() -> None:
    x = torch.randn(64, 8, 40, 40)
    want = SyncBatchNorm(8)(x).double().square().sum().item()
    streams = [torch.cuda.Stream() for _ in range(2)]
    modules = [SyncBatchNorm(8) for _ in streams]
    torch.cuda.synchronize()
    sums = []
    for _ in range(50):
        for stream, module in zip(streams, modules, strict=True):
            with torch.cuda.stream(stream):
                sums.append(module(x).double().square().sum())
    torch.cuda.synchronize()
    assert all(value.item() == pytest.approx(want, rel=1e-6) for value in sums)


@pytest.mark.parametrize("relu", [False, True])
def test_step_captured_in_a_graph_replays_like_the_plain_loop(relu: bool) -> None:
    module = SyncBatchNorm(16, momentum=None, fuse_relu=relu)
    follower = copy.deepcopy(module)
    x = torch.zeros(8, 16, 5, 5, requires_grad=True)
    dy = torch.zeros(8, 16, 5, 5)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(module(x), x, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        y = module(x)
        grads = torch.autograd.grad(y, [x, module.weight, module.bias], dy)
    follower.load_state_dict(module.state_dict())
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            dy.copy_(torch.randn_like(dy))
        graph.replay()
        other = x.detach().clone().requires_grad_()
        want = follower(other)
        wants = torch.autograd.grad(want, [other, follower.weight, follower.bias], dy)
        for got, expected in zip((y, *grads), (want, *wants), strict=True):
            assert torch.equal(got, expected)
        for name, value in follower.state_dict().items():
            assert torch.equal(module.state_dict()[name], value), name


def test_compiled_with_graph_trees_trains_like_eager() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 16, 3), SyncBatchNorm(16), nn.ReLU(), SyncBatchNorm(16))
    compiled = copy.deepcopy(plain)
    call = torch.compile(compiled, mode="reduce-overhead")
    for _ in range(5):  # warm-up, recording, replays
        x = torch.randn(8, 3, 10, 10)
        for module, forward in ((plain, plain), (compiled, call)):
            module.zero_grad()
            forward(x).square().mean().backward()
        for got, want in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-4)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(compiled.state_dict()[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("channel_last", [False, True])
def test_step_more_than_2_to_the_32_elements_is_right(channel_last: bool) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 48 << 30:
        pytest.skip("needs 48 GB of GPU memory")
    # Ones and the same number of threes. The threes are beyond 31- and 32-bit counts. Without them,
    # the mean is 1 and no value is normalized to -1.
    rows, channels = (1 << 30) + 5000, 4
    shape = (rows, channels) if channel_last else (rows // 100, channels, 100)
    x = torch.ones(shape, dtype=torch.float16)
    half = len(x) // 2
    x[half:].fill_(3)
    y = OPS.sync_batch_norm(x, None, None, None, None, None, 0.1, 0.0, "")[0]
    for part, expected in ((y[:half], -1.0), (y[half:], 1.0)):
        low, high = part.aminmax()
        assert abs(low - expected) < 1e-2 and abs(high - expected) < 1e-2
