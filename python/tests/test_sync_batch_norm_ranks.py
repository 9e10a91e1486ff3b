"""SyncBatchNorm on several ranks against one-process float64 batch norm on the whole batch."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from sync_batch_norm_support import (
    CutGradient,
    assert_near,
    fresh_seed,
    reference_batch_norm,
    run_ranks,
)
from sync_batch_norm_support import draw as draw_values
from torch import Tensor

from apex.parallel import SyncBatchNorm, create_syncbn_process_group

pytestmark = pytest.mark.processes


def _random_case(rng: random.Random, world_size: int) -> dict:
    channel_last = rng.random() < 0.4
    spatial = [rng.choice([1, 2, 3, 5, 7, 16, 33]) for _ in range(rng.choice([0, 1, 2, 2, 2, 3]))]
    sizes = [rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(world_size)]
    if sum(sizes) < 2:
        sizes[rng.randrange(world_size)] = 3
    channels = rng.choice([1, 2, 3, 7, 16, 33, 64, 130])
    # The reference keeps dozens of tensors of the whole batch, in float64, on every rank.
    while math.prod(spatial) * channels * sum(sizes) > 300_000:
        spatial[spatial.index(max(spatial))] //= 2
    return {
        "channels": channels,
        "spatial": spatial,
        "sizes": sizes,
        "dtype": rng.choice(
            [torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16]
        ),
        "channel_last": channel_last,
        "channels_last_memory": not channel_last and len(spatial) == 2 and rng.random() < 0.5,
        "relu": rng.random() < 0.4,
        "add": rng.random() < 0.4,
        "affine": rng.random() < 0.8,
        "track": rng.random() < 0.8,
        "momentum": rng.choice([None, 0.1, 0.3, 0.0]),
    }  # fmt: skip


def _slice_of(tensor: Tensor | None, sizes: list[int], rank: int) -> Tensor | None:
    return None if tensor is None else tensor[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def _check_case(case: dict, rank: int, generator: torch.Generator) -> None:
    """Every rank draws the whole batch from the same generator and keeps its slice."""
    dtype, sizes, channels = case["dtype"], case["sizes"], case["channels"]
    channel_last = case["channel_last"]
    spatial = [*case["spatial"], channels] if channel_last else [channels, *case["spatial"]]
    shape = [sum(sizes), *spatial]
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(size: list[int], to: torch.dtype) -> Tensor:
        return draw_values(size, to, generator)

    module = SyncBatchNorm(
        channels,
        eps=1e-3,
        momentum=case["momentum"],
        affine=case["affine"],
        track_running_stats=case["track"],
        channel_last=channel_last,
        fuse_relu=case["relu"],
        dtype=parameter_dtype,
    )
    weight = bias = None
    if case["affine"]:
        weight, bias = draw([channels], parameter_dtype), draw([channels], parameter_dtype)
        module.weight.data.copy_(weight)
        module.bias.data.copy_(bias)
        weight = weight.double().requires_grad_()
        bias = bias.double().requires_grad_()
    expected_mean = torch.zeros(channels, dtype=torch.float64)
    expected_var = torch.ones(channels, dtype=torch.float64)

    for step in range(2):
        x_all = draw(shape, dtype) * 2 + draw([1], dtype)
        z_all = draw(shape, dtype) if case["add"] else None
        x_ref = x_all.double().requires_grad_()
        z_ref = z_all.double().requires_grad_() if z_all is not None else None
        args = (x_ref, z_ref, weight, bias, 1e-3, channel_last)
        y_ref, mean, var = reference_batch_norm(*args, case["relu"])
        before_relu = reference_batch_norm(*args, False)[0].detach()
        # Where the sign before the ReLU is a matter of rounding, the gradient is not compared.
        dy_all = draw(shape, dtype) * (before_relu.abs() > 0.05)

        x = _slice_of(x_all, sizes, rank).clone()
        if case["channels_last_memory"]:
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        z = _slice_of(z_all, sizes, rank).clone().requires_grad_() if case["add"] else None
        dy = _slice_of(dy_all, sizes, rank).clone().requires_grad_()
        y = module(x, z)
        assert y.dtype == dtype
        if case["channels_last_memory"] and x.numel() > 0:
            assert y.is_contiguous(memory_format=torch.channels_last)
        assert_near(y, _slice_of(y_ref, sizes, rank), dtype, "output")

        leaves = [t for t in (x, z, module.weight, module.bias) if t is not None]
        leaves_ref = [t for t in (x_ref, z_ref, weight, bias) if t is not None]
        dy_ref = dy_all.double().requires_grad_()
        second_order = dtype == torch.float64
        grads = torch.autograd.grad(y, leaves, dy, create_graph=second_order)
        grads_ref = torch.autograd.grad(y_ref, leaves_ref, dy_ref, create_graph=True)
        for index, (got, want) in enumerate(zip(grads, grads_ref, strict=True)):
            if leaves[index].dim() == 1:  # parameters: the local sums add up to the whole
                total = got.detach().double()
                dist.all_reduce(total)
                assert_near(total, want, dtype, f"parameter gradient {index}")
            else:
                assert_near(got, _slice_of(want, sizes, rank), dtype, f"gradient {index}")
        if second_order:
            # Cotangents: one slice per rank for elements, the same vector on every rank for
            # parameters, so that the ranks' losses add up to the reference's.
            cotangents_all = [draw(list(t.shape), torch.float64) for t in leaves_ref]
            cotangents = [
                c if t.dim() == 1 else _slice_of(c, sizes, rank)
                for t, c in zip(leaves, cotangents_all, strict=True)
            ]
            wanted = [x, dy] + ([module.weight] if weight is not None else [])
            wanted_ref = [x_ref, dy_ref] + ([weight] if weight is not None else [])
            second = torch.autograd.grad(grads, wanted, cotangents)
            second_ref = torch.autograd.grad(grads_ref, wanted_ref, cotangents_all)
            for name, got, want in zip("x dy weight".split(), second, second_ref, strict=False):
                if name == "weight":
                    dist.all_reduce(got)
                else:
                    want = _slice_of(want, sizes, rank)
                assert_near(got, want, dtype, f"double backward: {name}")

        count = x_all.numel() // channels
        factor = 1 / (step + 1) if case["momentum"] is None else case["momentum"]
        expected_mean = (1 - factor) * expected_mean + factor * mean.detach()
        expected_var = (1 - factor) * expected_var + factor * var.detach() * count / (count - 1)
        if case["track"]:
            assert_near(module.running_mean, expected_mean, parameter_dtype, "running mean")
            assert_near(module.running_var, expected_var, parameter_dtype, "running variance")
            assert int(module.num_batches_tracked) == step + 1

    module.eval()
    statistics = (expected_mean, expected_var) if case["track"] else None
    x = _slice_of(x_all, sizes, rank).clone()
    if x.numel() // channels > 1:
        z = _slice_of(z_all, sizes, rank)
        want = reference_batch_norm(
            x.double(), None if z is None else z.double(), weight, bias, 1e-3, channel_last,
            case["relu"], statistics,
        )[0]  # fmt: skip
        assert_near(module(x, z), want, dtype, "evaluation")


def check_random_cases(rank: int, world_size: int, seed: int, cases: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for index in range(cases):
        case = _random_case(rng, world_size)
        try:
            _check_case(case, rank, generator)
        except Exception as error:
            raise AssertionError(
                f"seed {seed}, case {index} {case}, rank {rank}: {error}"
            ) from error


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sync_batch_norm_random_cases_match_one_process(world_size: int) -> None:
    run_ranks(world_size, check_random_cases, fresh_seed(), 40)


def _modes_body(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    batch = torch.randn(4, 5, 3, 2, 3)  # steps, whole batch, channels, height, width
    mine = slice(0, 2) if rank == 0 else slice(2, 5)
    for affine, track, momentum in itertools.product([True, False], [True, False], [None, 0.1]):
        module = SyncBatchNorm(3, 1e-3, momentum, affine, track)
        whole = torch.nn.BatchNorm2d(3, 1e-3, momentum, affine, track)
        for step, training in enumerate([True, True, False, True]):
            module.train(training)
            whole.train(training)
            x = batch[step, mine].clone().requires_grad_()
            x_all = batch[step].clone().requires_grad_()
            y = module(x)
            # Evaluation never looks at the other ranks, also where it has no running statistics.
            alone = not training and not track
            want = whole(x if alone else x_all)
            want_mine = want if alone else want[mine]
            case = f"{affine, track, momentum} "
            torch.testing.assert_close(y, want_mine, msg=case.__add__)
            (dx,) = torch.autograd.grad(y.pow(3).sum(), x)
            wanted = x if alone else x_all
            (dx_want,) = torch.autograd.grad(whole(wanted).pow(3).sum(), wanted)
            torch.testing.assert_close(
                dx, dx_want if alone else dx_want[mine], rtol=1e-4, atol=1e-5
            )
            if training and track:  # the reference has counted this batch twice
                whole.load_state_dict(module.state_dict())
        torch.testing.assert_close(dict(module.state_dict()), dict(whole.state_dict()))


def test_sync_batch_norm_every_mode_on_two_ranks_matches_torch_on_the_whole_batch() -> None:
    run_ranks(2, _modes_body)


def _count_body(rank: int, world_size: int) -> None:
    # A single value per channel over all ranks raises on every rank, and leaves the group usable.
    module = SyncBatchNorm(3)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        module(torch.randn(1 if rank == 0 else 0, 3))
    assert int(module.num_batches_tracked) == 0
    assert torch.equal(module.running_mean, torch.zeros(3))
    # One value on each rank is two in all.
    y = module(torch.full((1, 3), float(rank)))
    torch.testing.assert_close(y.abs(), torch.ones(1, 3), rtol=0, atol=1e-4)
    # An unsplittable world is refused before anything is created.
    with pytest.raises(ValueError, match="cannot be split"):
        create_syncbn_process_group(3)
    assert create_syncbn_process_group(0) is None


def test_sync_batch_norm_one_value_in_all_raises_on_every_rank() -> None:
    run_ranks(2, _count_body)


def _group_body(rank: int, world_size: int) -> None:
    x = torch.arange(16.0).view(8, 2)[2 * rank : 2 * rank + 2] ** 2
    pair = create_syncbn_process_group(2)
    module = SyncBatchNorm(2, process_group=pair)
    first = 4 * (rank // 2)
    both = torch.arange(16.0).view(8, 2)[first : first + 4] ** 2
    want = reference_batch_norm(both.double(), None, None, None, 1e-5, False, False)[0]
    torch.testing.assert_close(module(x).double(), want[2 * (rank % 2) :][:2], rtol=0, atol=1e-5)
    # A copy shares the group, a pickle leaves it behind.
    assert copy.deepcopy(module).process_group is pair
    assert copy.copy(module).process_group is pair
    assert pickle.loads(pickle.dumps(module)).process_group is None
    assert copy.copy(module)._process_group_name == module._process_group_name
    # With no group given the communicator is not the default group's, and is made once.
    names = {SyncBatchNorm(2)._process_group_name for _ in range(2)}
    assert names == {None}
    from apex.parallel.syncbn_group import default_group

    assert default_group() is default_group()
    assert default_group() is not dist.group.WORLD
    assert default_group().size() == world_size
    alone = create_syncbn_process_group(1)
    plain = torch.nn.BatchNorm1d(2)
    torch.testing.assert_close(SyncBatchNorm(2, process_group=alone)(x), plain(x))
    stranger = dist.new_group([0])
    if rank != 0:
        with pytest.raises(ValueError, match="not a member"):
            SyncBatchNorm(2, process_group=stranger)


def test_sync_batch_norm_process_group_is_used() -> None:
    run_ranks(4, _group_body)


def _collectives_body(rank: int, world_size: int, channel: str) -> None:
    os.environ["APEX_HOST_CHANNEL"] = channel
    exchange = ["c10d::alltoall_base_"] if channel == "0" else []  # in shared memory
    # A group decides once.
    module = SyncBatchNorm(4, fuse_relu=True, process_group=dist.new_group())
    x = torch.randn(3, 4, 5, requires_grad=True)
    module(x, torch.randn(3, 4, 5)).sum().backward()  # makes the communicator
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        y = module(x, torch.randn(3, 4, 5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        y.sum().backward()

    def collectives(profile: torch.profiler.profile) -> list[str]:
        return sorted(e.name for e in profile.events() if e.name.startswith("c10d::"))

    assert collectives(forward) == exchange
    assert collectives(backward) == exchange  # one round, where a sum takes two
    module.eval()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as evaluation:
        module(x).sum().backward()
    assert collectives(evaluation) == []
    # Parameters alone need no other rank.
    module.train()
    y = module(torch.randn(3, 4, 5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as parameters:
        y.sum().backward()
    assert collectives(parameters) == []


@pytest.mark.parametrize("channel", ["0", "1"])
def test_sync_batch_norm_one_collective_per_direction(channel: str) -> None:
    run_ranks(2, _collectives_body, channel)


def _many_channels_body(rank: int, world_size: int, channel: str) -> None:
    os.environ["APEX_HOST_CHANNEL"] = channel
    channels = 40_000  # their sums from all ranks are more than are gathered
    whole = torch.randn(
        6, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    dy = torch.randn(6, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    x = whole[3 * rank : 3 * rank + 3].clone().requires_grad_()
    y = SyncBatchNorm(channels, affine=False, process_group=dist.new_group())(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(dy[3 * rank : 3 * rank + 3])
    names = [e.name for e in profile.events() if e.name.startswith("c10d::")]
    through_gloo = ["c10d::alltoall_base_", "c10d::allreduce_"]  # headers alone go first
    assert names == (through_gloo if channel == "0" else [])
    whole.requires_grad_()
    want = reference_batch_norm(whole, None, None, None, 1e-5, False, False)[0]
    (dx,) = torch.autograd.grad(want, whole, dy)
    assert x.grad is not None
    assert_near(x.grad, dx[3 * rank : 3 * rank + 3], torch.float64, "gradient")


@pytest.mark.parametrize("channel", ["0", "1"])
def test_sync_batch_norm_many_channels_are_all_reduced(channel: str) -> None:
    run_ranks(2, _many_channels_body, channel)


def _no_gradient_body(rank: int, world_size: int) -> None:
    module = SyncBatchNorm(2, affine=False)
    x = torch.arange(12.0).view(6, 2).cos()[3 * rank : 3 * rank + 3].requires_grad_()
    y = CutGradient.apply(module(x), rank == 0)
    (y**3).sum().backward()
    whole = torch.arange(12.0).view(6, 2).cos().requires_grad_()
    want = torch.nn.functional.batch_norm(whole, None, None, training=True)
    (want[3:] ** 3).sum().backward()
    torch.testing.assert_close(x.grad, whole.grad[3 * rank : 3 * rank + 3], rtol=1e-4, atol=1e-5)


def test_sync_batch_norm_rank_without_gradient_does_not_keep_others_waiting() -> None:
    run_ranks(2, _no_gradient_body)


def _compile_body(rank: int, world_size: int) -> None:
    eager, module = SyncBatchNorm(4), SyncBatchNorm(4)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for step in range(2):
        x = torch.randn(2 + rank + step, 4, 3, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        compiled(x).square().sum().backward()
        eager(other).square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(dict(module.state_dict()), dict(eager.state_dict()))


def test_sync_batch_norm_compiled_fullgraph_matches_eager_on_two_ranks() -> None:
    run_ranks(2, _compile_body)


def _exact_count_body(rank: int, world_size: int) -> None:
    # 2^24 + 1 values in all: a float32 count would lose the one, and with it the unbiased factor.
    rows = (1 << 24) if rank == 0 else 1
    results = torch.ops.apex.sync_batch_norm(
        torch.zeros(rows, 1, dtype=torch.float16), None, None, None, None, None, None, 0.1, 1e-5,
        False, False, dist.group.WORLD.group_name,
    )  # fmt: skip
    assert int(results[3]) == (1 << 24) + 1


def test_sync_batch_norm_counts_are_exact_beyond_float32() -> None:
    run_ranks(2, _exact_count_body)
