# SPDX-License-Identifier: BSD-3-Clause
"""Scripts in the style of public ones run on one and two ranks, and resume bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_support import RankPool, forget_amp
from public_scripts import SCRIPTS, own_scale_loss

from apex import amp

pytestmark = pytest.mark.processes


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
