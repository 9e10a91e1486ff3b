# SPDX-License-Identifier: BSD-3-Clause
"""Miniatures of public training scripts train as they did with Apex (old_scripts.py), and resume
bit for bit (public_scripts.py)."""

from __future__ import annotations

from typing import Any

import old_scripts
import pytest
import torch
from ddp_support import RankPool, forget_amp
from public_scripts import SCRIPTS, own_scale_loss

from apex import amp

pytestmark = pytest.mark.processes

#: How far the loss must fall, and how close float32 runs on one and two ranks must be.
FALL, CLOSE = 0.75, 2e-3


def run(ranks: RankPool, world: int, script: Any, *args: Any) -> list[float]:
    results = ranks.run(world, script, *args)
    assert all(losses == results[0] for losses in results)
    losses = results[0]
    assert losses[-1] < FALL * losses[0], losses
    return losses


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_ssd_trains_on_one_and_two_ranks(ranks: RankPool, level: str) -> None:
    for world in (1, 2):
        run(ranks, world, old_scripts.train_ssd, level)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_bert_with_lamb_and_its_own_all_reduce_trains_alike_on_two_ranks(
    ranks: RankPool, level: str
) -> None:
    one, two = (run(ranks, world, old_scripts.train_bert, level) for world in (1, 2))
    assert one == pytest.approx(two, rel=CLOSE if level == "O0" else 0.05)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", ["lamb", "adam"])
def test_bert_with_the_wrapper_trains_alike_on_two_ranks(
    ranks: RankPool, name: str, level: str
) -> None:
    one, two = (run(ranks, n, old_scripts.train_bert, level, name, False) for n in (1, 2))
    # float16 rounds the gradients of one and of two ranks differently, depending on the processor's
    # instructions. Adam uses their signs, and amplifies the difference from step to step.
    first = 6 if (name, level) == ("adam", "O2") else len(one)
    assert one[:first] == pytest.approx(two[:first], rel=CLOSE if level == "O0" else 0.01)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("post", [True, False], ids=["own_all_reduce", "wrapper"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bert_resumed_equals_the_run_that_was_not_stopped(
    ranks: RankPool, level: str, post: bool, world: int
) -> None:
    whole = ranks.run(world, old_scripts.bert_parameters, level, "lamb", post, 12)
    resumed = ranks.run(world, old_scripts.bert_parameters, level, "lamb", post, 12, 6)
    assert resumed == whole
    assert resumed[0] != ranks.run(world, old_scripts.bert_parameters, level, "lamb", post, 6)[0]


def test_bert_with_a_scale_that_overflows_skips_and_trains(ranks: RankPool) -> None:
    start = 2.0**30
    losses = run(ranks, 2, old_scripts.train_bert, "O2", "lamb", True, 12, None, start)
    whole = run(ranks, 2, old_scripts.train_bert, "O2")
    assert losses == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_tacotron2_trains_on_one_and_two_ranks(ranks: RankPool, level: str) -> None:
    for world in (1, 2):
        run(ranks, world, old_scripts.train_tacotron, level)


@pytest.mark.parametrize(
    "level, scale", [("O0", None), ("O1", "1024.0"), ("O2", "128.0"), ("O2", "dynamic")]
)
def test_resnet_with_larc_trains_alike_on_two_ranks(
    ranks: RankPool, level: str, scale: str | None
) -> None:
    one, two = (run(ranks, world, old_scripts.train_resnet, level, scale) for world in (1, 2))
    # Batch norm is synchronized, so two ranks see the same batch as one.
    assert one == pytest.approx(two, rel=CLOSE if level == "O0" else 0.1)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O2-bf16"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_resumes_from_its_checkpoint_bit_for_bit(
    ranks: RankPool, tmp_path: Any, name: str, level: str, world: int
) -> None:
    path, script = str(tmp_path / "checkpoint{}.pt"), SCRIPTS[name]
    whole = ranks.run(world, script, level, path, "", 3)
    resumed = ranks.run(world, script, level, path, path.format(1), 3)
    early = ranks.run(world, script, level, path, "", 1)
    assert resumed == whole
    assert all(result == whole[0] for result in whole), "the ranks differ"
    assert early[0] != whole[0], "nothing was trained"


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_own_scale_loss_gives_the_gradients_of_amp_scale_loss(level: str) -> None:
    def gradients(scale_loss: Any, *options: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0
        )
        for delay in (True, False, False):
            with scale_loss(
                model(torch.ones(2, 3)).sum() / 8, optimizer, 0, **{options[0]: delay}
            ) as loss:
                loss.backward()
        amp._amp_state.loss_scalers[1]._loss_scale = 2.0**10
        if scale_loss is own_scale_loss:
            with pytest.raises(RuntimeError, match="cannot tell which loss scale"):
                optimizer._prepare_amp_backward()
        found = [param.grad for param in amp.master_params(optimizer)]
        forget_amp()
        return found

    mine, want = gradients(own_scale_loss, "delay"), gradients(amp.scale_loss, "delay_unscale")
    for a, b in zip(mine, want, strict=True):
        assert torch.equal(a, b) and a.abs().max() > 0.5
