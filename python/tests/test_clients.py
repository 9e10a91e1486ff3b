# SPDX-License-Identifier: BSD-3-Clause
"""Released packages that call apex: scripts/clients.sh installs them and runs this file."""

from __future__ import annotations

import copy
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from ddp_support import free_port
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
from apex.parallel import SyncBatchNorm, convert_syncbn_model

pytestmark = pytest.mark.clients
FOLDER = os.environ.get("APEX_CLIENTS")


@pytest.fixture(autouse=True)
def clients_on_path() -> Iterator[None]:
    """Behind everything else, so that what is in the environment counts first."""
    if FOLDER is None:
        yield
        return
    sys.path.append(FOLDER)
    yield
    sys.path.remove(FOLDER)


def client(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision for another torch
        pytest.skip(f"{name} cannot be imported: {error}; run scripts/clients.sh")


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


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_mmengine_apex_wrapper_accumulates_and_resumes(level: str) -> None:
    client("mmengine.model")
    kind = client("mmengine.optim").ApexOptimWrapper
    model, optimizer = model_and_optimizer()
    wrapper = kind(opt_level=level, loss_scale=128.0, optimizer=optimizer, accumulative_counts=2)
    losses = []
    for _ in range(20):
        with wrapper.optim_context(model):
            loss = nn.functional.mse_loss(model(X).float(), Y)
        wrapper.update_params(loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    state = copy.deepcopy(wrapper.state_dict())
    assert state["apex_amp"] == amp.state_dict()
    wrapper.load_state_dict(state)


def test_ignite_training_step_trains() -> None:
    engine = client("ignite.engine")
    model, optimizer = amp.initialize(*model_and_optimizer(), opt_level="O2", verbosity=0)
    step = engine.supervised_training_step_apex(model, optimizer, nn.functional.mse_loss)
    trainer = engine.Engine(step)
    losses: list[float] = []
    trainer.add_event_handler(
        engine.Events.ITERATION_COMPLETED, lambda e: losses.append(e.state.output)
    )
    trainer.run([(X, Y)] * 20, max_epochs=1)
    assert losses[-1] < losses[0]


def test_accelerate_prepares_our_optimizers() -> None:
    accelerator = client("accelerate").Accelerator(cpu=True)
    for kind in (FusedLAMB, FusedNovoGrad, FusedAdam):
        model, _ = model_and_optimizer()
        optimizer: Any = kind(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        accelerator.backward(nn.functional.mse_loss(model(X), Y))
        optimizer.step()
        optimizer.zero_grad()
        assert not any(map(torch.equal, before, model.parameters()))


def test_torchs_sharded_optimizer_and_checkpoints_take_ours() -> None:
    """Parts of torch itself, so that something of this file runs everywhere."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.optim import ZeroRedundancyOptimizer

    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        for kind in (FusedAdam, FusedNovoGrad):
            model, _ = model_and_optimizer()
            sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=0.01)
            nn.functional.mse_loss(model(X), Y).backward()
            sharded.step()
            sharded.consolidate_state_dict()
            sharded.load_state_dict(sharded.state_dict())
            sharded.step()
    finally:
        dist.destroy_process_group()
    model, _ = model_and_optimizer()
    optimizer = FusedLAMB(model.parameters())
    nn.functional.mse_loss(model(X), Y).backward()
    optimizer.step()
    saved = copy.deepcopy(state_dict.get_optimizer_state_dict(model, optimizer))
    again = FusedLAMB(model.parameters())
    state_dict.set_optimizer_state_dict(model, again, saved)
    assert again.param_groups[0]["step"] == 1
    for param in model.parameters():
        assert torch.equal(again.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])
