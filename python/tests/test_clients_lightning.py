# SPDX-License-Identifier: BSD-3-Clause
"""apex.parallel.integrations.lightning under Lightning's released Trainer.

The reference is a training loop without Lightning, in one process, on the batches of all ranks.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from clients_support import client, load, program_of
from ddp_support import RankPool, check, check_equal, check_near, check_same_on_all_ranks, raises
from lightning_support import (
    BATCH,
    RATE,
    SAMPLES,
    loader,
    network,
    plain,
    regression,
    trainer,
    unequal_loader,
    weighted_regression,
)
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = [pytest.mark.clients, pytest.mark.processes]
MODULE = "apex.parallel.integrations.lightning"


@pytest.fixture(autouse=True)
def lightning(request: pytest.FixtureRequest) -> None:
    if "without_lightning" not in request.node.name:
        client("lightning.pytorch")


def check_equals(net: nn.Module, expected: nn.Module, buffers: bool = True) -> None:
    """Check the parameters against the reference up to rounding, and bitwise between ranks."""
    state = expected.state_dict()
    for name, tensor in net.state_dict().items():
        if buffers or "running" not in name:
            check_near(tensor.double(), state[name].double(), name, 1e-11)
    check_same_on_all_ranks(list(net.parameters()), "parameters")


def _trains(rank: int, world: int) -> None:
    model = regression(network())
    with trainer(rank, world) as job:
        job.fit(model, loader(rank, world), loader(rank, world))
    check_equal(len(model.wrappers), 2 * SAMPLES // (BATCH * world), "steps")
    check_equal({type(w) for w in model.wrappers}, {DistributedDataParallel}, "the wrapper")
    check(job.strategy.model is model, "the module is still wrapped after fit")
    check(len(model.validated) > 2, "no validation")
    check_equals(model.net, plain(world), buffers=rank == 0)  # the reference has rank 0's


@pytest.mark.parametrize("world", [1, 2])
def test_fit_equals_a_plain_loop(ranks: RankPool, world: int) -> None:
    ranks.run(world, _trains)


def _accumulates(rank: int, world: int) -> None:
    model = regression(network())
    with trainer(rank, world, accumulate_grad_batches=3, max_epochs=1) as job:
        job.fit(model, loader(rank, world))
    check_equals(model.net, plain(world, batches=3, epochs=1), buffers=rank == 0)
    # Each of two ranks has three batches per epoch. Only the last one is synchronized.
    statistics = model.wrappers[0].statistics()
    check_equal(statistics["backwards"], 1, f"synchronized of {statistics}")


def test_accumulation_synchronizes_the_last_batch_only(ranks: RankPool) -> None:
    ranks.run(2, _accumulates)


CLIP = 0.5


def _weighs(rank: int, world: int) -> None:
    """The first step of an epoch has three batches, the second has one."""
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": CLIP}
    ours = load(MODULE).ApexStrategy
    model, plainly = weighted_regression(), weighted_regression()
    with trainer(rank, world, ours(gradient_average="weighted"), **options) as job:
        job.fit(model, unequal_loader(rank, world))
    type(plainly).training_step = _mean_loss
    del type(plainly).backward, type(plainly).on_before_optimizer_step
    with trainer(rank, world, **options) as job:
        job.fit(plainly, unequal_loader(rank, world))

    expected = weighted_regression()
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE, momentum=0.9)
    x, y = unequal_loader(0, 1).dataset.tensors
    losses, norms = [], []
    for step in 2 * (slice(0, 18), slice(18, SAMPLES)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(expected.net(x[step]), y[step])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(expected.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    check(max(norms) > CLIP, f"clipping is not tested by {norms}")
    check_equals(model.net, expected.net)
    check_near(torch.tensor(model.losses), torch.tensor(losses), "losses", 1e-6)
    # The negative control: the result without weights.
    found = plainly.net[0].weight - expected.net[0].weight
    check(found.abs().max() > 1e-3, f"the mean of means is only {found.abs().max()} off")


def _mean_loss(self: Any, batch: Any, index: int) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(self.net(x), y)


@pytest.mark.parametrize("world", [2, 3])
def test_weighted_accumulation_equals_one_process(ranks: RankPool, world: int) -> None:
    ranks.run(world, _weighs)


def _syncs_batch_norm(rank: int, world: int) -> None:
    model = regression(network())
    with trainer(rank, world, sync_batchnorm=True) as job:
        job.fit(model, loader(rank, world))
    check("apex.parallel.sync_batchnorm" in model.kinds, f"layers in fit: {model.kinds}")
    check_equal(type(model.net[1]), nn.BatchNorm1d, "after fit")
    check_equals(model.net, plain(world, sync=True))


def test_sync_batchnorm_is_ours_and_equals_the_whole_batch(ranks: RankPool) -> None:
    ranks.run(2, _syncs_batch_norm)


def _resumes(rank: int, world: int, folder: str) -> None:
    whole = regression(network())
    with trainer(rank, world, max_epochs=3) as job:
        job.fit(whole, loader(rank, world))
    first = regression(network())
    with trainer(rank, world, max_epochs=1) as job:
        job.fit(first, loader(rank, world))
        job.save_checkpoint(f"{folder}/last.ckpt")
    saved = torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]
    check_equal(sorted(saved), sorted(first.state_dict()), "names without the wrapper's")
    torch.manual_seed(rank)
    again = regression(nn.Sequential(*network()).apply(_forget))
    with trainer(rank, world, max_epochs=3) as job:
        job.fit(again, loader(rank, world), ckpt_path=f"{folder}/last.ckpt")
    for name, tensor in again.net.named_parameters():
        check_equal(tensor, whole.net.get_parameter(name), name)


def _forget(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 9.0)


def test_resumed_equals_the_run_that_was_not_stopped_bitwise(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, _resumes, str(tmp_path))


def adversaries(made: nn.Module, judge: nn.Module) -> Any:
    """Manual optimization. training_step runs backward of one network and then of the other."""
    base = load("lightning.pytorch").LightningModule

    class Adversaries(base):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.made, self.judge = made, judge

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer, loss in zip(self.optimizers(), (of_maker, of_judge), strict=True):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss(self.made, self.judge, *batch))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.made, self.judge)]

    return Adversaries()


def of_maker(made: nn.Module, judge: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (judge(made(x)) - 1).square().mean()


def of_judge(made: nn.Module, judge: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return judge(made(x).detach()).square().mean() + (judge(y) - 1).square().mean()


def two_networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    return nn.Linear(3, 1).double(), nn.Sequential(
        nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)
    ).double()


def _optimizes_by_hand(rank: int, world: int) -> None:
    model = adversaries(*two_networks())
    with trainer(rank, world) as job:
        job.fit(model, loader(rank, world))
    made, judge = two_networks()
    for _ in range(2):
        for batch in loader(batch=BATCH * world):
            for net, loss in ((made, of_maker), (judge, of_judge)):
                gradients = torch.autograd.grad(loss(made, judge, *batch), list(net.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                        parameter -= 0.05 * gradient
    check_equals(model.made, made)
    check_equals(model.judge, judge)


def test_manual_optimization_of_two_networks_equals_a_plain_loop(ranks: RankPool) -> None:
    ranks.run(2, _optimizes_by_hand)


def doubled(state: list[str], bucket: Any) -> Any:
    """A hook whose effect is visible: gradients count twice."""
    state.append("called")
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(2 * bucket.buffer())
    return done


def _registers_hook(rank: int, world: int) -> None:
    called: list[str] = []
    strategy = load(MODULE).ApexStrategy(
        ddp_comm_state=called, ddp_comm_hook=doubled, message_size=7
    )
    model = regression(network())
    with trainer(rank, world, strategy, max_epochs=1, limit_train_batches=2) as job:
        job.fit(model, loader(rank, world))
    check(len(called) > 2, "the hook was not called for each bucket of each step")
    check_equal(model.wrappers[0].message_size, 7, "message_size")


def test_comm_hook_and_options_reach_the_wrapper(ranks: RankPool) -> None:
    ranks.run(2, _registers_hook)


def _fails(rank: int, world: int) -> None:
    model = regression(network())
    step = type(model).training_step

    def failing(self: Any, batch: Any, index: int) -> Tensor:
        if index == 1:
            raise ValueError("on purpose")
        return step(self, batch, index)

    type(model).training_step = failing
    with trainer(rank, world) as job, raises(ValueError, "on purpose"):
        job.fit(model, loader(rank, world))
    check(job.strategy.model is model, "the module is still wrapped")
    type(model).training_step = step
    with trainer(rank, world, max_epochs=1) as job:  # it can be wrapped and trained again
        job.fit(model, loader(rank, world))
    check_same_on_all_ranks(list(model.parameters()), "after a second fit")


def test_training_step_that_raises_leaves_the_module_unwrapped(ranks: RankPool) -> None:
    ranks.run(2, _fails)


def _casts(rank: int, world: int) -> None:
    model = regression(network().float())
    with trainer(rank, world, precision="bf16-mixed") as job:
        seen: list[torch.dtype] = []
        model.net[0].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
        job.fit(model, loader(rank, world, dtype=torch.float32))
    check_equal(set(seen), {torch.bfloat16}, "types")
    check_same_on_all_ranks(list(model.parameters()), "parameters")


def test_mixed_precision_of_lightning_casts_in_our_wrapper(ranks: RankPool) -> None:
    ranks.run(2, _casts)


def test_names_are_registered_with_their_start_methods() -> None:
    strategies = client("lightning.pytorch.strategies").StrategyRegistry
    ours = importlib.import_module(MODULE).ApexStrategy
    methods = {"apex": "popen", "apex_spawn": "spawn", "apex_fork": "fork", "apex_notebook": "fork"}
    for name, method in methods.items():
        strategy = strategies.get(name)
        assert type(strategy) is ours
        assert strategy._start_method == method
    assert type(strategies.get("ddp")) is not ours


@pytest.mark.parametrize("option", ["mesage_size", "device_ids", "module"])
def test_unknown_option_is_refused_by_name(option: str) -> None:
    ours = importlib.import_module(MODULE).ApexStrategy
    with pytest.raises(TypeError, match=f"no option '{option}'"):
        ours(**{option: 1})


#: Prepended and appended to the page's program, in each of its two processes.
BEFORE = "import clients_support\nclients_support.load('lightning.pytorch')\n"
BEHIND = """
weights = [p.detach().sum().item().hex() for p in model.parameters()]
strategy = trainer.strategy
print("\\nRESULT", strategy.global_rank, type(strategy).__name__, *weights, flush=True)
"""


#: Appended to the page's program with weights: one process, with all samples of each step.
WEIGHTED = """
order = torch.randperm(64, generator=torch.Generator().manual_seed(0))  # of Lightning's sampler
x, y, mask = (tensor[order] for tensor in data.tensors)
net = torch.nn.Linear(4, 1)
net.load_state_dict(before)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in (slice(0, 48), slice(48, 64)):
    optimizer.zero_grad()
    loss = (net(x[step]) - y[step])[mask[step]].square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
torch.testing.assert_close(model.net.state_dict(), net.state_dict())
torch.testing.assert_close(trainer.callback_metrics["loss"], loss.detach())
"""


def _printed(code: str, folder: Path) -> list[tuple[str, str, str]]:
    """The printed results of the program's processes: rank, strategy and parameters."""
    client("lightning.pytorch")
    script = folder / "program.py"
    script.write_text(BEFORE + code + BEHIND)
    environment = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parent), "CUDA_VISIBLE_DEVICES": ""
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(re.findall(r"^RESULT (\d) (\w+) (.*)$", done.stdout, re.M))


def test_program_of_the_page_starts_its_ranks_and_trains(tmp_path: Path) -> None:
    results = _printed(program_of("lightning.md", 'strategy="apex"'), tmp_path)
    assert [(rank, kind) for rank, kind, _ in results] == [
        ("0", "ApexStrategy"), ("1", "ApexStrategy")
    ]  # fmt: skip
    assert results[0][2] == results[1][2]


def test_program_of_the_page_with_weights_equals_one_process(tmp_path: Path) -> None:
    made = "model = Masked()\n"
    code = program_of("lightning.md", made).replace(
        made,
        "torch.manual_seed(0)\n" + made
        + "before = {name: p.clone() for name, p in model.net.state_dict().items()}\n",
    )  # fmt: skip
    results = _printed(code + WEIGHTED, tmp_path)
    assert [rank for rank, _, _ in results] == ["0", "1"]
    assert results[0][2] == results[1][2]


def test_without_lightning_the_import_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs with and without Lightning installed."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match="needs the package lightning.*pip install lightning"):
        importlib.import_module(MODULE)
