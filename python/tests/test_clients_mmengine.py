# SPDX-License-Identifier: BSD-3-Clause
"""mmengine's ApexOptimWrapper, on one and two ranks, in mmengine's own order of calls.

mmengine wraps the model first and calls ``amp.initialize`` on the wrapped module later, in the
first ``optim_context``. It loads a checkpoint before that.
"""

from __future__ import annotations

import copy
import io
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from clients_support import client, load
from ddp_support import RankPool, check, check_equal, check_near, check_same_on_all_ranks, raises
from torch import Tensor, nn

from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model

pytestmark = pytest.mark.clients
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "libraries.md"
#: The allowed difference of float16 from the float32 loop.
CLOSE = {"O0": 1e-5, "O1": 2e-2, "O2": 2e-2}
STEPS, ACCUMULATED, RATE = 6, 2, 0.1


@pytest.fixture(autouse=True)
def mmengine() -> None:
    client("mmengine.model")
    client("mmengine.optim")


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def batches(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * ACCUMULATED, 8, 3, generator=generator)
    return [(part[rank::world], part[rank::world].sum(1, keepdim=True)) for part in x]


def wrapped(net: nn.Module) -> nn.Module:
    """The model in our wrapper. mmengine must know it, to pass the inner module to amp."""
    load("mmengine.model")
    registry = load("mmengine.registry").MODEL_WRAPPERS
    registry.register_module(name="Apex", module=DistributedDataParallel, force=True)
    return DistributedDataParallel(convert_syncbn_model(net))


def optimizer_of(net: nn.Module, level: str, loss_scale: Any = 128.0) -> Any:
    return load("mmengine.optim").ApexOptimWrapper(
        opt_level=level,
        loss_scale=loss_scale,
        verbosity=0,
        optimizer=torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9),
        accumulative_counts=ACCUMULATED,
    )


def train(
    model: nn.Module, optimizer: Any, data: list[tuple[Tensor, Tensor]], inside: bool = False
) -> None:
    """Train. Without `inside`, backward is outside the context, as in mmengine's own train_step."""
    for x, y in data:
        with optimizer.optim_context(model):
            loss = nn.functional.mse_loss(model(x).float(), y)
            if inside:
                optimizer.update_params(loss)
        if not inside:
            optimizer.update_params(loss)


def plain() -> nn.Module:
    """The reference: a float32 loop without mmengine and amp, on the batches of all ranks."""
    net = network(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    for number, (x, y) in enumerate(batches(0, 1), 1):
        (nn.functional.mse_loss(net(x), y) / ACCUMULATED).backward()
        if number % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net


def _trains(rank: int, world: int, level: str, inside: bool) -> None:
    model = wrapped(network(rank))  # rank-specific seeds; rank 0's parameters are broadcast
    optimizer = optimizer_of(model, level)
    train(model, optimizer, batches(rank, world), inside)
    expected = plain().state_dict()
    for name, tensor in model.module.state_dict().items():
        check_near(tensor.float(), expected[name].float(), name, CLOSE[level], 0.1)
    check_same_on_all_ranks(list(model.parameters()), "parameters")
    check_same_on_all_ranks(list(amp.master_params(optimizer.optimizer)), "master weights")
    half = torch.float16 if level == "O2" else torch.float32
    check_equal(model.module[0].weight.dtype, half, "parameters of level")
    # no_sync() takes effect at backward, so mmengine's context around forward alone has no effect.
    synchronized = STEPS if inside else STEPS * ACCUMULATED
    check_equal(model.statistics()["backwards"], synchronized, "synchronized backwards")


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("level", CLOSE)
def test_ranks_with_a_seed_each_train_as_one_process(
    ranks: RankPool, level: str, inside: bool, world: int
) -> None:
    ranks.run(world, _trains, level, inside)


def through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _resumes(rank: int, world: int, level: str, initialized: bool) -> None:
    data = batches(rank, world)
    middle = len(data) // 2
    whole = wrapped(network(rank))
    optimizer = optimizer_of(whole, level, "dynamic")
    train(whole, optimizer, data[:middle])
    saved = through_file({"net": whole.module.state_dict(), "optimizer": optimizer.state_dict()})
    scale = copy.deepcopy(saved["optimizer"]["apex_amp"])
    check_equal(scale, amp.state_dict(), "the saved loss scale")
    train(whole, optimizer, data[middle:])
    wanted = [p.detach().clone() for p in amp.master_params(optimizer.optimizer)]

    net = network(100 + rank)
    net.load_state_dict(saved["net"])
    model = wrapped(net)
    optimizer = optimizer_of(model, level, "dynamic")
    if initialized:  # as the page's hook does
        with optimizer.optim_context(model):
            pass
    optimizer.load_state_dict(saved["optimizer"])
    with optimizer.optim_context(model):
        check_equal(amp.state_dict(), scale, "the loaded loss scale")
    train(model, optimizer, data[middle:])
    found = list(amp.master_params(optimizer.optimizer))
    check(len(found) == len(wanted) > 0, "number of parameters")
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if initialized or level == "O1" or world == 1:
            check_equal(one.detach(), other, f"parameter {number}")
        else:  # master weights start from rounded values: docs/howto/libraries.md
            check_near(one, other, f"parameter {number}", 2e-3, 1.0)


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("initialized", [False, True], ids=["as_mmengine", "with_the_hook"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resumed_equals_the_run_that_was_not_stopped(
    ranks: RankPool, level: str, initialized: bool, world: int
) -> None:
    ranks.run(world, _resumes, level, initialized)


def on_page() -> tuple[type[nn.Module], type[Any]]:
    """The wrapper and the hook of docs/howto/libraries.md."""
    load("mmengine.model")
    (code,) = re.findall(r"^```python\n(from apex.*?)^```$", PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    # A rank serves several tests, and mmengine refuses to register a name twice.
    exec(
        compile(code.replace("register_module()", "register_module(force=True)"), PAGE, "exec"),
        names,
    )
    return names["ApexDistributedDataParallel"], names["InitializeAmpBeforeResume"]


def regression(net: nn.Module) -> nn.Module:
    base = load("mmengine.model").BaseModel

    class Regression(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = convert_syncbn_model(net)

        def forward(self, x: Tensor, y: Tensor, mode: str) -> Any:
            found = self.net(x).float()
            return {"loss": nn.functional.mse_loss(found, y)} if mode == "loss" else [found]

    return Regression()


def _steps(rank: int, world: int, level: str, ours: bool) -> None:
    wrapper = on_page()[0] if ours else load("mmengine.model").MMDistributedDataParallel
    model: Any = wrapper(regression(network(rank)))
    optimizer = optimizer_of(model, level)
    for x, y in batches(rank, world):
        if level == "O2" and not ours:
            with raises(
                RuntimeError, "amp.initialize would cast the parameter 'module.net.0.weight'"
            ):
                model.train_step({"x": x, "y": y}, optimizer)
            return
        log = model.train_step({"x": x, "y": y}, optimizer)
        check_equal(list(log), ["loss"], "what is logged")
    expected = plain().state_dict()
    for name, tensor in model.module.net.state_dict().items():
        check_near(tensor.float(), expected[name].float(), name, CLOSE[level], 0.1)
    check_same_on_all_ranks(list(model.parameters()), "parameters")
    if ours:
        check_equal(model.statistics()["backwards"], STEPS, "synchronized backwards")
        found = model.eval().val_step({"x": x, "y": y})
        check_equal(found[0].shape, y.shape, "val_step")


@pytest.mark.processes
@pytest.mark.parametrize("ours", [True, False], ids=["wrapper_of_the_page", "MMDistributed"])
@pytest.mark.parametrize("level", CLOSE)
def test_train_step_trains_as_one_process(ranks: RankPool, level: str, ours: bool) -> None:
    """mmengine's own wrapper is refused at O2, as the page says."""
    ranks.run(2, _steps, level, ours)


def _hooks(rank: int, world: int) -> None:
    wrapper, hook = on_page()
    model = wrapper(regression(network(rank)))
    optimizer = optimizer_of(model, "O2")
    runner = types.SimpleNamespace(model=model, optim_wrapper=optimizer)
    hook().after_load_checkpoint(runner, {})
    check(hasattr(optimizer.optimizer, "_amp_stash"), "amp is not initialized")
    check_equal(model.module.net[0].weight.dtype, torch.float16, "parameters")


@pytest.mark.processes
def test_hook_of_the_page_initializes_amp(ranks: RankPool) -> None:
    ranks.run(2, _hooks)


def _runs(rank: int, world: int, folder: str) -> None:
    """Use Runner for two epochs in one run, and for one epoch and another from its checkpoint."""
    wrapper, hook = on_page()
    runner_of = load("mmengine.runner").Runner
    # Each rank has six batches per epoch, so that accumulation is complete at each checkpoint.
    samples = [{"x": x[i], "y": y[i]} for x, y in batches(0, 1) for i in range(2)]

    def make(name: str, epochs: int, seed: int, **options: Any) -> Any:
        amp_wrapper = {
            "type": "ApexOptimWrapper",
            "opt_level": "O2",
            "verbosity": 0,
            "accumulative_counts": ACCUMULATED,
            "optimizer": {"type": "SGD", "lr": RATE, "momentum": 0.9},
        }
        return runner_of(
            model=regression(network(seed)),
            work_dir=f"{folder}/{name}",
            train_dataloader={
                "batch_size": 2,
                "dataset": samples,
                "collate_fn": {"type": "default_collate"},
                "sampler": {"type": "DefaultSampler", "shuffle": False},
            },
            train_cfg={"by_epoch": True, "max_epochs": epochs},
            optim_wrapper=amp_wrapper,
            cfg={"model_wrapper_cfg": {"type": wrapper.__name__}},
            custom_hooks=[{"type": hook.__name__}],
            default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
            launcher="pytorch",
            experiment_name=f"{name}{rank}",
            randomness={"seed": seed, "diff_rank_seed": True},
            log_level="ERROR",
            **options,
        )

    def weights(runner: Any) -> list[Tensor]:
        return [p.detach().clone() for p in amp.master_params(runner.optim_wrapper.optimizer)]

    whole = make("whole", 2, 1 + rank)
    whole.train()
    check(isinstance(whole.model, DistributedDataParallel), f"wrapped in {type(whole.model)}")
    wanted = weights(whole)
    check(whole.model.statistics()["backwards"] > 0, "nothing was averaged")
    checkpoint = f"{folder}/whole/epoch_1.pth"
    again = make("again", 2, 50 + rank, load_from=checkpoint, resume=True)
    with pytest.MonkeyPatch.context() as patch:
        # mmengine's checkpoints contain its own objects, which torch.load refuses by default.
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        again.train()
    check_equal(again.epoch, 2, "epochs")
    for number, (found, other) in enumerate(zip(weights(again), wanted, strict=True)):
        check_equal(found, other, f"parameter {number}")
    check_same_on_all_ranks(wanted, "master weights")


@pytest.mark.processes
def test_runner_with_the_page_resumes_to_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    client("mmengine.runner")
    ranks.run(2, _runs, str(tmp_path))
