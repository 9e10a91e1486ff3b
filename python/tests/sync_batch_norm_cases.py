# SPDX-License-Identifier: BSD-3-Clause
"""Random cases of SyncBatchNorm on several ranks, against float64 batch norm on the whole batch."""

from __future__ import annotations

import math
import random

import torch
import torch.distributed as dist
from sync_batch_norm_support import (
    assert_near,
    reference_batch_norm,
)
from sync_batch_norm_support import draw as draw_values
from torch import Tensor

from apex.parallel import SyncBatchNorm


def _random_case(rng: random.Random, world_size: int) -> dict:
    channel_last = rng.random() < 0.4
    spatial = [rng.choice([1, 2, 3, 5, 7, 16, 33]) for _ in range(rng.choice([0, 1, 2, 2, 2, 3]))]
    sizes = [rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(world_size)]
    if sum(sizes) < 2:
        sizes[rng.randrange(world_size)] = 3
    channels = rng.choice([1, 2, 3, 7, 16, 33, 64, 130])
    # The reference keeps dozens of float64 tensors of the whole batch on every rank.
    while math.prod(spatial) * channels * sum(sizes) > 300_000:
        spatial[spatial.index(max(spatial))] //= 2
    dtype = rng.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16])
    track = rng.random() < 0.8
    # torch's own keeps statistics in the input's dtype if no other tensor is float32.
    affine = rng.random() < 0.8 or (dtype.itemsize == 2 and not track)
    return {
        "channels": channels,
        "spatial": spatial,
        "sizes": sizes,
        "dtype": dtype,
        "channel_last": channel_last,
        "channels_last_memory": not channel_last and len(spatial) == 2 and rng.random() < 0.5,
        "relu": rng.random() < 0.4,
        "add": rng.random() < 0.4,
        "affine": affine,
        "track": track,
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
        # The gradient is not compared where rounding decides the sign before the ReLU.
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
