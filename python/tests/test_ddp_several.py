# SPDX-License-Identifier: BSD-3-Clause
"""Several wrappers, groups and users of a group at the same time.

The references: the average over ranks in one process in float64, bitwise equality of ranks with
different seeds, and the time limit of the pool."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_near,
    check_same_on_all_ranks,
    gradients,
    to_reference,
)
from nccl_like import eager_nccl
from several_support import Net, batch, check_average
from torch import Tensor, nn

from apex._internal.groups import timeout_of
from apex.parallel import DistributedDataParallel, create_syncbn_process_group
from apex.parallel.syncbn_group import default_group

pytestmark = pytest.mark.processes

VIEWS = pytest.mark.parametrize("options", [{"message_size": 1}, {"message_size": 1 << 20},
                                            {"message_size": 1, "gradient_as_bucket_view": True}],
                                ids=["many", "one", "views"])  # fmt: skip


def _wrapper_is_dropped(rank: int, world: int, how: str, ends: str) -> None:
    """Hazard: the remaining wrapper does not own the parameters, and nothing is averaged."""
    torch.manual_seed(rank)
    net = nn.Linear(4, 1)
    net.score = lambda x: nn.Module.__call__(net, x).sigmoid()  # type: ignore[assignment]
    first = DistributedDataParallel(net)
    if ends == "same":
        second = DistributedDataParallel(net)
    else:
        second = DistributedDataParallel(nn.Sequential(net, nn.Linear(1, 1)))
        second(torch.randn(2, 4)).sum().backward()
    kept = second(torch.randn(2, 4)).sum() if ends == "kept output" else None
    del second
    gc.collect()
    for _ in range(2):
        x = torch.randn(8, 4)
        first.zero_grad()
        out = first.score(x) if how == "method" else first(x)
        inputs = list(net.parameters()) if how == "inputs" else None
        out.mean().backward(inputs=inputs)
        check_same_on_all_ranks([p.grad for p in net.parameters()], how)
    if kept is not None:
        kept.backward()  # its wrapper takes the parameters back, for this time
        first.zero_grad()
        first.score(torch.randn(8, 4)).mean().backward()
        check_same_on_all_ranks([net.weight.grad], "afterwards")


@pytest.mark.parametrize("ends", ["same", "outer", "kept output"])
@pytest.mark.parametrize("how", ["method", "inputs", "forward"])
def test_wrapper_is_dropped_the_other_one_averages(ranks: RankPool, how: str, ends: str) -> None:
    ranks.run(2, _wrapper_is_dropped, how, ends)


def _dropped_within_backward(rank: int, world: int) -> None:
    """Hazard: where the garbage collector drops a wrapper earlier than on other ranks, another one
    takes parameters that those ranks still average with the dropped one."""
    torch.manual_seed(rank)
    net = nn.Linear(4, 3)
    first: Any = DistributedDataParallel(net)
    second: Any = DistributedDataParallel(net)
    second.circle = [second]
    x = torch.randn(8, 4)
    outs = first(x), second(x)
    if rank == 0:
        outs[0].register_hook(lambda grad: (gc.collect(), grad)[1])
    loss = outs[0].square().mean() + outs[1].mean()
    del second
    loss.backward()
    check_same_on_all_ranks([p.grad for p in net.parameters()], "gradients")
    del loss, outs
    gc.collect()
    first.zero_grad()
    net(torch.randn(8, 4)).sum().backward()
    check_same_on_all_ranks([p.grad for p in net.parameters()], "afterwards")
    del first
    gc.collect()
    net.zero_grad()
    net(torch.randn(8, 4)).sum().backward()  # without a wrapper nothing is averaged
    means = net.weight.grad.clone()  # type: ignore[union-attr]
    dist.all_reduce(means)
    check(not torch.equal(means / world, net.weight.grad), "averaged without a wrapper")  # type: ignore[arg-type]


def test_wrapper_is_dropped_within_backward_on_one_rank(ranks: RankPool) -> None:
    ranks.run(2, _dropped_within_backward)


def _two_wrappers(rank: int, world: int, options: dict[str, Any], freezes: bool) -> None:
    torch.manual_seed(rank)
    models: list[Any] = [Net(), Net()]
    wrappers = [DistributedDataParallel(model, **options) for model in models]
    for model in models:
        model.collective = True
    # The layers of the second model that each rank uses. Unused ones are sent at the end of
    # backward, after the first model; other ranks send them before it.
    used = [[0, 1, 2], [0, 2], [1]]
    for step in range(5):

        def loss(nets: list[Any], r: int, step: int = step) -> Tensor:
            x = batch(r, step).to(next(nets[1].parameters()).dtype)
            if not freezes:
                return nets[1](nets[0](x), used[(r + step) % 3]).square().mean()
            inner = getattr(nets[1], "module", nets[1])
            inner.layers[1].requires_grad_(step < 2)
            return nets[1](nets[0](x)).square().mean()

        for wrapper in wrappers:
            wrapper.zero_grad()
        loss(wrappers, rank).backward()
        check_average(models, loss, world, f"step {step}")


@VIEWS
@pytest.mark.parametrize("freezes", [False, True], ids=["unused", "frozen"])
def test_wrappers_on_one_group_with_layers_unused_on_some_ranks_or_frozen(
    ranks: RankPool, freezes: bool, options: dict[str, Any]
) -> None:
    ranks.run(3, _two_wrappers, options, freezes)


def _one_ends_with_an_error(rank: int, world: int, failing: int) -> None:
    """The callback of one wrapper raises on one rank. All gradients of both wrappers are
    averages."""
    torch.manual_seed(rank)
    models: list[Any] = [Net(), Net()]
    wrappers = [DistributedDataParallel(model, message_size=1) for model in models]
    raised = [False]

    def fail(_: Any) -> None:
        if raised[0]:
            raise LookupError("on purpose")

    wrappers[failing].register_bucket_callback(fail)
    for step in range(6):

        def loss(nets: list[Any], r: int, step: int = step) -> Tensor:
            x = batch(r, step).to(next(nets[1].parameters()).dtype)
            return nets[1](nets[0](x)).square().mean()

        for wrapper in wrappers:
            wrapper.zero_grad()
        raised[0] = step % 2 == 1 and rank == 1
        try:
            loss(wrappers, rank).backward()
            check(not raised[0], "the callback's error was lost")
        except RuntimeError as error:
            check(raised[0] and "on purpose" in str(error), f"not its own error: {error}")
        check_average(models, loss, world, f"step {step}")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_at_the_end_of_one_wrapper_leaves_the_others_complete(
    ranks: RankPool, failing: int
) -> None:
    ranks.run(3, _one_ends_with_an_error, failing)


def _streams(rank: int, world: int) -> None:
    """Pairs of ranks with their own communicators. Each pair averages its own gradients."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank)
    model = Net()
    mine = pairs[rank // 2]
    ddp = DistributedDataParallel(
        model, message_size=1, num_allreduce_streams=3, process_group=mine
    )
    first = rank // 2 * 2
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        reference = to_reference(model)
        for r in (first, first + 1):
            (reference(batch(r, step).double()).square().mean() / 2).backward()
        expected = gradients(reference)
        for name, grad in gradients(model).items():
            check_near(grad, expected[name], f"step {step}: {name}")
    dist.barrier()


def test_several_communicators_on_subgroups_average_their_own(ranks: RankPool) -> None:
    ranks.run(4, _streams)


def _streams_of_eager_nccl(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank > 1:  # the other pair creates no wrapper
        return
    with eager_nccl() as asked:
        model = Net()
        ddp = DistributedDataParallel(
            model, message_size=1, num_allreduce_streams=3, process_group=pairs[0]
        )
        check(asked == 2 * ["synchronize", "split_group [[0, 1]]"], str(asked))
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        reference = to_reference(model)
        for r in range(2):
            (reference(batch(r, step).double()).square().mean() / 2).backward()
        expected = gradients(reference)
        for name, grad in gradients(model).items():
            check_near(grad, expected[name], f"step {step}: {name}")


def test_several_communicators_of_a_subgroup_of_eager_nccl_are_split_by_its_ranks_alone(
    ranks: RankPool,
) -> None:
    ranks.run(4, _streams_of_eager_nccl)


def _wrapped_again(rank: int, world: int, how: str, options: dict[str, Any]) -> None:
    torch.manual_seed(rank)
    model: Any = Net()
    held: list[Any] = []
    old = None
    for round_ in range(3):
        ddp = DistributedDataParallel(model, **options)
        if how == "inside":
            ddp = DistributedDataParallel(ddp, **options)
        for step in range(2):
            ddp.zero_grad()
            x = batch(rank, 10 * round_ + step)
            # A replaced wrapper works like its module.
            run = old if how == "kept" and old is not None and step == 0 else ddp
            output = run(x)
            output.square().mean().backward()
            if rank == 0 and how == "held":
                held.append(output)
            check_average(
                [model],
                lambda nets, r, n=10 * round_ + step: nets[0](batch(r, n).double()).square().mean(),
                world,
                f"round {round_}, step {step}",
            )
        if how == "kept":
            old = ddp
        del ddp
        if rank == 1:
            gc.collect()


@VIEWS
@pytest.mark.parametrize("how", ["held", "kept", "inside", "dropped"])
def test_module_that_is_wrapped_again_is_averaged_once(
    ranks: RankPool, how: str, options: dict[str, Any]
) -> None:
    ranks.run(2, _wrapped_again, how, options)


def _shared_layers(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    first, second = Net(), Net()
    second.layers[0] = first.layers[0]
    wrappers = [DistributedDataParallel(first), DistributedDataParallel(second)]
    for step in range(3):
        for wrapper in wrappers:
            wrapper.zero_grad()

        def loss(nets: list[Any], r: int, step: int = step) -> Tensor:
            x = batch(r, step).to(next(nets[0].parameters()).dtype)
            return nets[0](x).square().mean() + nets[1](x).sin().mean()

        loss(wrappers, rank).backward()
        check_average([first, second], loss, world, f"step {step}")


def test_wrappers_that_share_a_layer(ranks: RankPool) -> None:
    ranks.run(2, _shared_layers)


CHANGES = {
    "double and back": lambda m: m.double().float(),
    "half and back": lambda m: m.half().float(),
    "bfloat16 and back": lambda m: m.bfloat16().float(),
    "memory format": lambda m: m.to(memory_format=torch.channels_last),
    "data": lambda m: [setattr(p, "data", p.data.clone()) for p in m.parameters()],
    "gradients' data": lambda m: [
        setattr(p.grad, "data", torch.zeros_like(p)) for p in m.parameters() if p.grad is not None
    ],
    "assigned": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.out = nn.Linear(4, 2)
        self.collective = False

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x.view(5, 3, 4, 4)).tanh().mean((2, 3)))


def _changes(rank: int, world: int, change: str, options: dict[str, Any]) -> None:
    torch.manual_seed(rank)
    model = ConvNet()
    ddp = DistributedDataParallel(model, **options)

    def images(r: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + r)
        return torch.randn(5, 48, generator=generator)

    for step in range(5):
        ddp.zero_grad()
        if step in (2, 3):
            CHANGES[change](ddp.module)
        ddp(images(rank, step)).square().mean().backward()
        if step == 3:  # also between a backward and the next one, which accumulates
            CHANGES[change](ddp.module)
            if change == "gradients' data":
                continue
            ddp.zero_grad()
            ddp(images(rank, step)).square().mean().backward()
        check_average(
            [model],
            lambda nets, r, n=step: nets[0](images(r, n).double()).square().mean(),
            world,
            f"{change}, step {step}",
        )


@VIEWS
@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_replace_memory_or_accumulators_keep_averaging(
    ranks: RankPool, change: str, options: dict[str, Any]
) -> None:
    ranks.run(2, _changes, change, options)


def _timeouts(rank: int, world: int) -> None:
    """Every group that the package creates has the timeout of its parent group."""
    wanted = timeout_of(dist.group.WORLD)
    check(wanted is not None and wanted.total_seconds() != 1800, "the pool's timeout is torch's")
    for group in (default_group(), create_syncbn_process_group(1), create_syncbn_process_group(2)):
        check_equal(timeout_of(group), wanted, group.group_name)


def test_groups_of_the_package_inherit_the_timeout(ranks: RankPool) -> None:
    ranks.run(2, _timeouts)
