# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/mistakes.md: two ranks over Gloo, with both wrappers.

Two rows are tested elsewhere: a rank that is late in test_stalls, batches of different sizes
in test_ddp_weighted.
"""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, notices
from torch import Tensor, nn

import apex.parallel

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
#: The step in which rank 1 makes the mistake.
MISTAKE = 5
#: How long rank 0 waits for a rank that has left the loop.
TIMEOUT = datetime.timedelta(seconds=4)


class Net(nn.Module):
    def __init__(self, names: tuple[str, str] = ("first", "second")) -> None:
        super().__init__()
        for name in names:  # the order in which layers are registered
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = self.second(x)
        return self.first(y) if both else y


def _zero_division(gradient: Tensor) -> None:
    raise ZeroDivisionError


def _step(mistake: str, ddp: Any, optimizer: Any, rank: int, step: int) -> None:
    now = step == MISTAKE and rank == 1
    if mistake == "end" and now:
        os._exit(3)
    if mistake == "load" and now:
        ddp.load_state_dict({name: value + 1 for name, value in ddp.state_dict().items()})
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))
    optimizer.zero_grad()
    if mistake == "module":
        y = ddp.module(x)
    elif mistake == "unused":
        y = ddp(x, step != MISTAKE)
    else:
        y = ddp(x)
    loss = y.square().mean()
    if mistake == "skip" and now:
        return
    if mistake == "exception" and now:
        handle = next(iter(ddp.parameters())).register_hook(_zero_division)
        try:
            loss.backward()
        except ZeroDivisionError:
            handle.remove()
            return
    loss.backward()
    optimizer.step()
    if mistake == "step" and now:
        optimizer.step()


def _train(rank: int, world: int, package: str, mistake: str) -> tuple[int, str, list[str], Tensor]:
    """The step that raised (or STEPS), the error, notices, and all parameters."""
    group = dist.new_group(list(range(world)), timeout=TIMEOUT)
    wrapper: Any = {
        "torch": nn.parallel.DistributedDataParallel,
        "apex": apex.parallel.DistributedDataParallel,
    }[package]
    torch.manual_seed(0)
    wrong = mistake == "order" and rank == 1
    net = Net(("second", "first")) if wrong else Net()
    step, said = -1, ""
    with notices() as noted:
        try:
            options: dict[str, Any] = {"replica_check_every": 20} if mistake == "load" else {}
            ddp = wrapper(net, process_group=group, **(options if package == "apex" else {}))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            for step in range(STEPS):  # noqa: B007
                _step(mistake, ddp, optimizer, rank, step)
            step = STEPS
        except RuntimeError as error:
            said = str(error)
    named = sorted(net.named_parameters())
    flat = torch.cat([parameter.detach().flatten() for _, parameter in named])
    return step, said, noted, flat


def _averaged() -> Tensor:
    """The parameters of one process that trains with the mean of both ranks' losses."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            (net(x).square().mean() / 2).backward()
        optimizer.step()
    return torch.cat(
        [parameter.detach().flatten() for _, parameter in sorted(net.named_parameters())]
    )


def test_forward_through_the_module_torch_does_not_average_and_apex_does(ranks: RankPool) -> None:
    theirs = ranks.run(2, _train, "torch", "module")
    assert [(step, said) for step, said, _, _ in theirs] == [(STEPS, "")] * 2
    assert not torch.allclose(theirs[0][3], theirs[1][3], atol=1e-4)
    for step, said, noted, parameters in ranks.run(2, _train, "apex", "module"):
        assert (step, said, noted) == (STEPS, "", [])
        torch.testing.assert_close(parameters, _averaged())


@pytest.mark.parametrize("mistake", ["load", "step"])
def test_other_weights_on_one_rank_torch_trains_on_and_apex_reports(
    ranks: RankPool, mistake: str
) -> None:
    theirs = ranks.run(2, _train, "torch", mistake)
    assert [(step, said) for step, said, _, _ in theirs] == [(STEPS, "")] * 2
    assert not torch.allclose(theirs[0][3], theirs[1][3], atol=1e-4)
    ours = ranks.run(2, _train, "apex", mistake)
    if mistake == "step":
        for step, said, _, _ in ours:
            assert step == MISTAKE + 1
            assert "out of step: rank 1 made another number of optimizer steps" in said
    else:
        assert [(step, said) for step, said, _, _ in ours] == [(STEPS, "")] * 2
        (text,) = ours[0][2][:1]
        assert "rank 1 differs from rank 0" in text
        assert int(re.findall(r"backward number (\d+)", text)[0]) <= MISTAKE + 1 + 20


def test_layers_in_another_order_torch_averages_them_and_apex_raises(ranks: RankPool) -> None:
    theirs = ranks.run(2, _train, "torch", "order")
    assert [(step, said) for step, said, _, _ in theirs] == [(STEPS, "")] * 2
    for step, said, _, _ in ranks.run(2, _train, "apex", "order"):
        assert step == -1
        assert "rank 1's model differs from rank 0's: parameter 0 is 'first.weight'" in said


def test_unused_parameter_torch_raises_and_apex_averages(ranks: RankPool) -> None:
    for step, said, _, _ in ranks.run(2, _train, "torch", "unused"):
        assert step == MISTAKE + 1
        assert "find_unused_parameters=True" in said
    ours = ranks.run(2, _train, "apex", "unused")
    assert [(step, said) for step, said, _, _ in ours] == [(STEPS, "")] * 2
    assert torch.equal(ours[0][3], ours[1][3])


def test_caught_exception_in_backward_apex_names_the_rank(ranks: RankPool) -> None:
    theirs = ranks.run(2, _train, "torch", "exception")
    assert [step for step, _, _, _ in theirs] == [MISTAKE, MISTAKE + 1]
    assert "rank 1" not in theirs[0][1]
    assert "find_unused_parameters=True" in theirs[1][1]
    step, said, _, _ = ranks.run(2, _train, "apex", "exception")[0]
    assert step == MISTAKE
    assert "was ended by an exception on rank 1" in said


def test_rank_that_skips_a_backward_waits_at_the_end_and_apex_names_it(ranks: RankPool) -> None:
    for package in ("torch", "apex"):
        first, last = ranks.run(2, _train, package, "skip")
        assert last[:2] == (STEPS, "")
        assert first[0] == STEPS - 1
        assert ("rank 1" in first[1]) == (package == "apex"), first[1]


def test_rank_that_ends_apex_names_it(ranks: RankPool) -> None:
    for package in ("torch", "apex"):
        (step, said, _, _), code = ranks.run(2, _train, package, "end", lost=(1,))
        assert (step, code) == (MISTAKE, 3)
        assert ("rank 1" in said and "has ended" in said) == (package == "apex"), said
