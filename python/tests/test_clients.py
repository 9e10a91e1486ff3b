# SPDX-License-Identifier: BSD-3-Clause
"""Released packages that use apex. scripts/clients.sh installs them and runs this file.

Lightning, transformers and mmengine have files of their own.
"""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from clients_support import client, load, program_of, run_program
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_near,
    check_same_on_all_ranks,
    forget_amp,
)
from torch import nn
from transformers_support import job

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
from apex.parallel import DistributedDataParallel, SyncBatchNorm, convert_syncbn_model

pytestmark = pytest.mark.clients


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


X, Y = torch.randn(16, 3), torch.randn(16, 1)


def test_timm_apex_scaler_clips_and_resumes() -> None:
    scaler = client("timm.utils").ApexScaler()
    model, optimizer = amp.initialize(
        *model_and_optimizer(), opt_level="O1", loss_scale=128.0, verbosity=0
    )
    first = None
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        first = loss.item() if first is None else first
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    assert loss.item() < first
    state = scaler.state_dict()
    scaler.load_state_dict(state)
    assert state == amp.state_dict()


def test_timm_norms_use_the_functions_of_apex() -> None:
    fast_norm = client("timm.layers.fast_norm")
    assert fast_norm.has_apex and fast_norm.has_apex_rmsnorm
    x, weight, bias = torch.randn(2, 5, 4), torch.rand(4), torch.rand(4)
    same = nn.functional.layer_norm(x, (4,), weight, bias, 1e-5)
    assert torch.equal(fast_norm.fast_layer_norm(x, [4], weight, bias, 1e-5), same)
    same = nn.functional.rms_norm(x, (4,), weight, 1e-5)
    torch.testing.assert_close(fast_norm.fast_rms_norm(x, [4], weight, 1e-5), same)


def test_timm_models_convert_and_train() -> None:
    timm = client("timm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resnet = convert_syncbn_model(timm.create_model("resnet18", num_classes=3))
    assert isinstance(resnet.bn1, SyncBatchNorm)
    with pytest.warns(UserWarning, match="BatchNormAct2d"):
        efficient = convert_syncbn_model(timm.create_model("efficientnet_b0", num_classes=3))
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, num_classes=3)
    for model in (resnet, efficient, vit):
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def _whole_batch(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    """Compare one step on two halves of a batch with one process, plain batch norm and float64."""
    model = load("timm").create_model(name, num_classes=3, **options).double()
    plain = copy.deepcopy(model)
    x, y = torch.randn(4, 3, 32, 32).double(), torch.tensor([0, 1, 2, 1])
    ddp = DistributedDataParallel(convert_syncbn_model(model))
    half = slice(2 * rank, 2 * rank + 2)
    nn.functional.cross_entropy(ddp(x[half]), y[half]).backward()
    nn.functional.cross_entropy(plain(x), y).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, parameter in model.named_parameters():
        check_near(parameter.grad, expected[name], name, 1e-10, largest)
    check_same_on_all_ranks([p.grad for p in model.parameters()], "gradients")
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        check_near(ours.double(), theirs.double(), name, 1e-10)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name, options",
    [("resnet10t", {}), ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 16, "depth": 2})],
)
def test_timm_models_on_two_ranks_equal_the_whole_batch(
    ranks: RankPool, name: str, options: dict[str, Any]
) -> None:
    client("timm")
    ranks.run(2, _whole_batch, name, options)


def _keeps_and_saves(rank: int, world: int, folder: str) -> None:
    utils, models = load("timm.utils"), load("timm.models")
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(load("timm").create_model("resnet10t", num_classes=3))
    check(utils.unwrap_model(ddp) is ddp.module, "unwrapped")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    averages = [kind(ddp.module, decay=0.5) for kind in (utils.ModelEmaV2, utils.ModelEmaV3)]
    wanted = {name: tensor.clone() for name, tensor in ddp.module.named_parameters()}
    for _ in range(2):
        ddp(torch.randn(4, 3, 64, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in ddp.module.named_parameters():
            wanted[name] = wanted[name].lerp(parameter.detach(), 0.5)
        for average in averages:
            average.update(ddp)
    for average in averages:
        inner = utils.unwrap_model(average)
        check_same_on_all_ranks(list(inner.parameters()), "averages")
        for name, parameter in inner.named_parameters():
            check_near(parameter, wanted[name], name, 1e-6)
    if rank > 0:
        return
    saver = utils.CheckpointSaver(
        ddp, optimizer, model_ema=averages[1], checkpoint_dir=folder, recovery_dir=folder
    )
    saver.save_checkpoint(0, 1.0)
    saved = f"{folder}/last.pth.tar"
    expected = {name: tensor.clone() for name, tensor in ddp.module.state_dict().items()}
    for model in (ddp, ddp.module):  # names without module. are for both
        nn.init.zeros_(ddp.module.fc.weight)
        check_equal(models.resume_checkpoint(model, saved, optimizer), 1, "epoch")
        for name, tensor in ddp.module.state_dict().items():
            check_equal(tensor, expected[name], name)
    nn.init.zeros_(ddp.module.fc.weight)
    models.load_checkpoint(ddp, saved, use_ema=True)
    check_equal(ddp.module.fc.weight, averages[1].module.fc.weight, "the average")


@pytest.mark.processes
def test_timm_averages_saves_and_loads_a_wrapped_model(ranks: RankPool, tmp_path: Path) -> None:
    client("timm")
    ranks.run(2, _keeps_and_saves, str(tmp_path))


def test_timm_fusedlamb_is_ours_behind_timms_own_assertion(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm refuses its fused optimizers without CUDA, where ours would work."""
    create = client("timm.optim").create_optimizer_v2
    model, _ = model_and_optimizer()
    if not torch.cuda.is_available():
        with pytest.raises(AssertionError, match="CUDA required for APEX optimizers"):
            create(model, opt="fusedlamb")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    optimizer = create(model, opt="fusedlamb", lr=0.01, weight_decay=0.1)
    monkeypatch.undo()
    assert type(optimizer) is FusedLAMB
    twin = copy.deepcopy(model)
    groups = [  # timm's groups: no decay for biases
        {"params": [p for p in twin.parameters() if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": 0.1},
    ]
    for net, stepped in ((model, optimizer), (twin, FusedLAMB(groups, lr=0.01))):
        for _ in range(3):
            stepped.zero_grad()
            nn.functional.mse_loss(net(X), Y).backward()
            stepped.step()
    for ours, direct in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, direct)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_ignite_training_step_equals_a_loop_with_amp(level: str, accumulated: int) -> None:
    engine = client("ignite.engine")
    batches = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 16, 4)] * 4

    def initialized() -> Any:
        return amp.initialize(*model_and_optimizer(), opt_level=level, verbosity=0)

    model, optimizer = initialized()
    loss_of = nn.functional.mse_loss
    step = engine.supervised_training_step_apex(
        model, optimizer, loss_of, gradient_accumulation_steps=accumulated
    )
    trainer = engine.Engine(step)
    losses: list[float] = []
    trainer.add_event_handler(
        engine.Events.ITERATION_COMPLETED, lambda e: losses.append(e.state.output)
    )
    trainer.run(batches, max_epochs=1)

    forget_amp()
    twin, optimizer = initialized()
    expected = []
    for number, (x, y) in enumerate(batches):
        if number % accumulated == 0:
            optimizer.zero_grad()
        loss = loss_of(twin(x), y) / accumulated
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if (number + 1) % accumulated == 0:
            optimizer.step()
        expected.append((loss * accumulated).item())
    assert losses == expected
    assert sum(losses[-4:]) < sum(losses[:4])
    for ours, direct in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, direct)


#: Appended to the page's program on each rank: one process, with all samples of each step.
EPOCHS_OF_ONE_PROCESS = """
alone = torch.nn.Linear(4, 1)
alone.load_state_dict(before)
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
x, y = data.tensors
for epoch in range(3):
    for batch in torch.arange(24).split(8):
        optimizer.zero_grad()
        loss_of(alone(x[batch]), y[batch]).backward()
        optimizer.step()
    if rank == 0:
        print("expected:", loss_of(alone(x), y).item())
for ours, wanted in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(ours, wanted)
if rank == 0:
    import pathlib

    (file,) = pathlib.Path("checkpoints").iterdir()
    read = torch.load(file, weights_only=False)
    assert set(read["model"]) == {"weight", "bias"} and set(read) == set(saved)
    torch.testing.assert_close(read["model"]["weight"], model.module.weight, rtol=0, atol=0)
    prefixed = {f"module.{name}": tensor for name, tensor in read["model"].items()}
    for to_load, state in (
        (model.module, read["model"]), (model, read["model"]), (model, prefixed)
    ):
        torch.nn.init.zeros_(model.module.weight)
        Checkpoint.load_objects({"model": to_load}, {"model": state})
        assert torch.equal(model.module.weight, read["model"]["weight"])
"""


@pytest.mark.processes
def test_ignite_program_of_the_page_equals_one_process(tmp_path: Path) -> None:
    client("ignite.engine")
    code = program_of("libraries.md", "import ignite")
    seed = "torch.manual_seed(idist.get_rank())  # other weights on each rank\n"
    code = code.replace("model = DDP(", f"{seed}model = DDP(")
    code = code.replace(
        "optimizer = ",
        "before = {name: t.clone() for name, t in model.module.state_dict().items()}\noptimizer = ",
        1,
    ).replace("idist.finalize()", "rank = idist.get_rank()\nidist.finalize()")
    printed = run_program(code + EPOCHS_OF_ONE_PROCESS, 2, tmp_path, "ignite")
    losses = [float(loss) for loss in re.findall(r"^epoch \d: (.*)$", printed, re.M)]
    expected = [float(loss) for loss in re.findall(r"^expected: (.*)$", printed, re.M)]
    assert len(losses) == 3
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)
    # The negative control: ranks that train alone.
    plain = code.replace("trainer.run(", "model.disable_allreduce()\ntrainer.run(")
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run_program(plain + EPOCHS_OF_ONE_PROCESS, 2, tmp_path, "ignite")


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad, FusedAdam])
def test_accelerate_steps_our_optimizers_as_a_loop_does(kind: Any) -> None:
    accelerator = client("accelerate").Accelerator(cpu=True)
    model, _ = model_and_optimizer()
    twin, _ = model_and_optimizer()
    direct = kind(twin.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.01))
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(X), Y))
        optimizer.step()
        direct.zero_grad()
        nn.functional.mse_loss(twin(X), Y).backward()
        direct.step()
    start, _ = model_and_optimizer()
    for found, wanted, old in zip(
        model.parameters(), twin.parameters(), start.parameters(), strict=True
    ):
        assert torch.equal(found, wanted) and not torch.equal(found, old)


def _saves_state(rank: int, world: int, folder: str) -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 1)
    with job(rank, world):
        accelerator = load("accelerate").Accelerator(cpu=True)
        check_equal(accelerator.num_processes, world, "processes")
        model, optimizer = model_and_optimizer()
        optimizer = accelerator.prepare(optimizer)
        ddp = DistributedDataParallel(model)
        accelerator.register_for_checkpointing(ddp)

        def step() -> None:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(ddp(x), y))
            optimizer.step()

        step()
        accelerator.save_state(folder)
        saved = [parameter.detach().clone() for parameter in ddp.parameters()]
        step()
        expected = [parameter.detach().clone() for parameter in ddp.parameters()]
        accelerator.load_state(folder)
        for parameter, old in zip(ddp.parameters(), saved, strict=True):
            check_equal(parameter, old, "loaded")
        step()
        for parameter, wanted in zip(ddp.parameters(), expected, strict=True):
            check_equal(parameter, wanted, "continued")
        check_same_on_all_ranks(list(ddp.parameters()), "parameters")


@pytest.mark.processes
def test_accelerate_saves_and_loads_the_state_of_a_wrapped_model(
    ranks: RankPool, tmp_path: Path
) -> None:
    client("accelerate")
    ranks.run(2, _saves_state, str(tmp_path))


#: Appended to the page's program on each rank: one process, with the samples of all ranks.
EPOCH_OF_ONE_PROCESS = """
x, y = data.tensors
weight, bias = before
for step in (slice(0, 16), slice(16, 22)):
    residual = x[step] @ weight.T + bias - y[step]
    if accelerator.is_main_process:
        print("expected:", residual.square().mean().item())
    gradients = [2 * residual.T @ x[step] / len(residual), 2 * residual.mean(0)]
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    scale = 0.1 * min(1.0, 5 / norm.item())
    if accelerator.is_main_process:
        print("norm:", norm.item())
    weight, bias = weight - scale * gradients[0], bias - scale * gradients[1]
torch.testing.assert_close(model.module.weight.detach(), weight)
torch.testing.assert_close(model.module.bias.detach(), bias)
"""


@pytest.mark.processes
def test_accelerate_program_of_the_page_equals_one_process(tmp_path: Path) -> None:
    """Two steps, of two and of one micro-batch per rank, with four and two samples."""
    client("accelerate")
    code = program_of("libraries.md", "from accelerate import")
    made, wrapped = "model = torch.nn", 'model = DDP(model, gradient_average="weighted")\n'
    code = code.replace(made, f"torch.manual_seed(0)\n{made}").replace("(), 1.0)", "(), 5.0)")
    code = code.replace(
        wrapped, f"{wrapped}before = [p.detach().clone() for p in model.parameters()]\n"
    )
    printed = run_program(code + EPOCH_OF_ONE_PROCESS, 2, tmp_path)
    losses = [float(loss) for loss in re.findall(r"^mean loss of the step: (.*)$", printed, re.M)]
    expected = [float(loss) for loss in re.findall(r"^expected: (.*)$", printed, re.M)]
    norms = [float(norm) for norm in re.findall(r"^norm: (.*)$", printed, re.M)]
    assert len(losses) == 2
    assert norms[0] > 5 > norms[1]  # one of the two is clipped
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)
    # The negative control: micro-batches with equal weights.
    plain = code.replace("model.weight(len(x))", "model.weight(1)").replace('"sum"', '"mean"')
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run_program(plain + EPOCH_OF_ONE_PROCESS, 2, tmp_path)
