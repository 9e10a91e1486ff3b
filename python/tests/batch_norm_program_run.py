# SPDX-License-Identifier: BSD-3-Clause
"""Runs a program of batch_norm_programs.py on one rank, and compares it with references."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from batch_norm_programs import EPS, Program, Step
from ddp_support import check, check_equal, check_same_on_all_ranks, raises
from sync_batch_norm_support import assert_near, draw, reference_batch_norm
from torch import Tensor

from apex.parallel import SyncBatchNorm


def in_memory(values: Tensor, memory: str, channel_last: bool) -> Tensor:
    """A leaf with these values in the requested memory layout, if possible."""
    if memory == "channels_last" and not channel_last:
        laid = values.movedim(1, -1).contiguous().movedim(-1, 1)
    elif memory == "transposed":
        laid = values.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif memory == "expanded" and values.numel() > 0 and (values == values.flatten()[0]).all():
        laid = values.flatten()[0].expand(values.shape)
    elif memory == "sliced":
        base = values.new_full([2 * size + 1 for size in values.shape], float("nan"))
        laid = base[(slice(1, None, 2),) * values.dim()]
        laid.copy_(values)
    elif memory == "offset":
        laid = values.new_empty(values.numel() + 1)[1:].view(values.shape)
        laid.copy_(values)
    else:
        laid = values.clone()
    return laid.detach()


def make_module(program: Program, generator: torch.Generator) -> SyncBatchNorm:
    module = SyncBatchNorm(
        program.channels, EPS, program.momentum, program.affine, program.track,
        channel_last=program.channel_last, fuse_relu=program.relu, dtype=program.parameter_dtype,
    )  # fmt: skip
    for tensor in [*module.parameters(), *(b for b in module.buffers() if b.dim() == 1)]:
        tensor.data.copy_(
            torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu") + 0.2
        )
        if program.strided:
            tensor.data = in_memory(tensor.data, "sliced", False)
    if program.track:
        counter = program.counter
        module.num_batches_tracked = torch.tensor(2, dtype=counter) if counter else None
    return module


class OneProcess:
    """The reference: all ranks' batch in float64. In evaluation without statistics, this rank's
    only."""

    def __init__(self, program: Program, step: Step, module: SyncBatchNorm, rank: int) -> None:
        self.program, self.step = program, step
        alone = not step.training and not program.track
        self.sizes = [step.sizes[rank]] if alone else step.sizes
        first = 0 if alone else sum(step.sizes[:rank])
        self.mine = slice(first, first + step.sizes[rank])
        statistics = None
        if not step.training and program.track:
            statistics = (module.running_mean.double(), module.running_var.double())
        self.statistics = statistics

    def draw(self, shape: list[int], generator: torch.Generator) -> Tensor:
        """Random values, in the dtype of the training."""
        return draw(shape, self.program.dtype, generator)

    def shape(self) -> list[int]:
        c, spatial = self.program.channels, self.program.spatial
        rest = [*spatial, c] if self.program.channel_last else [c, *spatial]
        return [sum(self.sizes), *rest]

    def values_per_channel(self) -> int:
        return sum(self.sizes) * math.prod(self.program.spatial)

    def run(self, leaves: dict[str, Tensor], relu: bool) -> tuple[Tensor, Tensor, Tensor]:
        values = [leaves.get(name) for name in "xzwb"]
        return reference_batch_norm(
            *values, EPS, self.program.channel_last, relu, self.statistics
        )  # fmt: skip


def check_buffers(
    program: Program, module: SyncBatchNorm, before: dict[str, Tensor], one: OneProcess,
    counts: bool,    mean: Tensor | None, var: Tensor | None,
) -> None:  # fmt: skip
    """``mean`` and ``var`` are None if the running statistics do not change."""
    if not program.track:
        return
    counted = before.get("num_batches_tracked")
    if counted is not None:
        check_equal(module.num_batches_tracked, counted + counts, "counter")
    if mean is None or var is None:
        for name in ("running_mean", "running_var"):
            check_equal(getattr(module, name), before[name], name)
        return
    factor = program.momentum
    if factor is None:
        factor = 0.0 if counted is None else 1.0 / (counted.item() + 1)
    n = one.values_per_channel()
    for name, value in (("running_mean", mean), ("running_var", var * n / (n - 1))):
        want = (1 - factor) * before[name].double() + factor * value.detach()
        assert_near(getattr(module, name), want, program.parameter_dtype, name)
    statistics = torch.stack([module.running_mean, module.running_var])
    check_same_on_all_ranks([statistics], "running statistics")


def leaves_of(step: Step, module: SyncBatchNorm, x: Tensor, z: Tensor | None) -> dict[str, Tensor]:
    found = {"x": x, "z": z, "w": module.weight, "b": module.bias}
    leaves = {name: tensor for name, tensor in found.items() if tensor is not None}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in step.frozen)
        leaf.grad = None
    return leaves


def first_derivatives(
    step: Step, y: Tensor, leaves: dict[str, Tensor], dy: Tensor, create_graph: bool
) -> dict[str, Tensor]:
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    if step.how == "grad":
        names = [name for name in names if name in step.wanted]
    if not names:
        return {}
    if step.how == "backward" and not create_graph:
        y.backward(dy)
        return {name: leaves[name].grad for name in names}
    asked = [leaves[name] for name in names]
    return dict(zip(names, torch.autograd.grad(y, asked, dy, create_graph=create_graph),
                    strict=True))  # fmt: skip


def check_gradient(
    name: str, got: Tensor, want: Tensor, x: Tensor, dtype: torch.dtype, whose: str = ""
) -> None:
    # A parameter's gradient is a sum, which may cancel, so its error is relative to its terms.
    terms = 1 if name in "xz" else max(1, x.numel() // max(1, got.numel()))
    got, want = got.double() / math.sqrt(terms), want / math.sqrt(terms)
    assert_near(got, want, dtype, f"gradient of {name}{whose}")


def run_step(
    program: Program, step: Step, module: SyncBatchNorm, rank: int, generator: torch.Generator
) -> None:
    # torch's gradient is wrong in evaluation with strided parameters.
    module.train(step.training or program.strided)
    step = replace(step, training=module.training)
    one = OneProcess(program, step, module, rank)
    dtype, double = program.dtype, program.dtype == torch.float64
    add = step.add
    x_all = (one.draw(one.shape(), generator) * 2 + step.offset).to(dtype)
    z_all = one.draw(one.shape(), generator) if add else None
    before = {name: value.clone() for name, value in module.named_buffers()}
    values = {"x": x_all, "z": z_all, "w": module.weight, "b": module.bias}
    reference = {
        name: value.detach().double().requires_grad_()
        for name, value in values.items()
        if value is not None
    }
    laid = {
        name: in_memory(value[one.mine], step.memory.get(name, ""), program.channel_last)
        for name, value in (("x", x_all), ("z", z_all))
        if value is not None
    }
    originals = {name: value.clone() for name, value in laid.items()}
    leaves = leaves_of(step, module, laid["x"], laid.get("z"))
    x, z = leaves["x"], leaves.get("z")
    if one.statistics is None and one.values_per_channel() == 1:
        with raises(ValueError, "Expected more than 1 value per channel"):
            module(x, z)
        if program.world > 1:  # torch's own counts the batch that it refuses
            check_buffers(program, module, before, one, False, None, None)
        return
    mode: Any = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with mode.get(step.how, torch.enable_grad)():
        y = module(x, z)
    if step.sabotage:
        y = y * 1.1
    check_equal(y.dtype, dtype, "dtype of the output")
    y_ref, mean, var = one.run(reference, program.relu)
    assert_near(y, y_ref[one.mine], dtype, "output")
    # An empty batch is counted, as in torch, and changes nothing else.
    changes = step.training and one.values_per_channel() > 0
    statistics = (mean, var) if changes else (None, None)
    check_buffers(program, module, before, one, step.training, *statistics)
    for name, value in originals.items():
        check(torch.equal(laid[name], value), f"{name} was changed")
    if step.how in ("no_grad", "inference"):
        check(not y.requires_grad, "the output requires a gradient")
        return

    # The gradient is not compared where rounding decides the sign before the ReLU.
    near_kink = one.run(reference, False)[0].detach().abs() <= 0.05
    dy_all = one.draw(one.shape(), generator) * ~(near_kink & program.relu)
    if step.memory.get("dy") == "expanded" and not program.relu:  # as the gradient of a sum
        dy_all = one.draw([1], generator).expand(one.shape())
    dy = in_memory(dy_all[one.mine], step.memory.get("dy", ""), program.channel_last)
    second = step.second and double
    dy.requires_grad_(second)
    got = first_derivatives(step, y, leaves, dy, second)
    dy_ref = dy_all.double().requires_grad_()
    total: Any = 0.0
    pairs = []
    for name, gradient in got.items():
        check_equal(gradient.dtype, leaves[name].dtype, f"dtype of the gradient of {name}")
        (want,) = torch.autograd.grad(y_ref, reference[name], dy_ref, create_graph=True)
        if name in "xz":
            local = want[one.mine]
        else:  # a parameter's gradient covers this rank's values
            mine = (y_ref[one.mine], reference[name], dy_ref[one.mine])
            (local,) = torch.autograd.grad(*mine, retain_graph=True)
        # torch's own sums parameter gradients in the dtype of the input.
        synchronized = step.training and program.world > 1
        check_gradient(name, gradient, local, x, gradient.dtype if synchronized else dtype)
        # Equal on all ranks for a parameter, so that the ranks' losses add up.
        weight = one.draw(list(want.shape), generator)
        pairs.append((gradient, weight[one.mine] if name in "xz" else weight))
        total = total + (want * weight.double()).sum()
    if second and got:
        check_second(pairs, total, leaves | {"dy": dy}, reference | {"dy": dy_ref}, one)


def check_second(
    pairs: list[tuple[Tensor, Tensor]], total: Tensor, leaves: dict[str, Tensor],
    reference: dict[str, Tensor], one: OneProcess,
) -> None:  # fmt: skip
    mine: Any = sum((gradient * weight).sum() for gradient, weight in pairs)
    if not mine.requires_grad:
        return
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    second = torch.autograd.grad(mine, [leaves[name] for name in names], allow_unused=True)
    wants = torch.autograd.grad(total, [reference[name] for name in names], allow_unused=True)
    for name, got, want in zip(names, second, wants, strict=True):
        want = torch.zeros_like(reference[name]) if want is None else want
        got = torch.zeros_like(leaves[name]) if got is None else got
        if name in "wb":
            if len(one.sizes) > 1:
                dist.all_reduce(got)
        else:
            want = want[one.mine]
        assert_near(got, want, torch.float64, f"second derivative of {name}")


def run_programs(rank: int, world: int, programs: list[Program]) -> None:
    for program in programs:
        module = make_module(program, torch.Generator().manual_seed(program.seed))
        for index, step in enumerate(program.steps):
            # A separate generator per step, because a rank that evaluates alone draws fewer values.
            generator = torch.Generator().manual_seed(program.seed * 10 + index)
            try:
                run_step(program, step, module, rank, generator)
            except Exception as error:
                what = f"batch-norm program of seed {program.seed}, step {index}"
                raise AssertionError(f"{what}: {error!r}\n{program}") from error
