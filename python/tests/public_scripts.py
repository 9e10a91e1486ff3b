# SPDX-License-Identifier: BSD-3-Clause
"""Miniature training scripts in the style of public ones of 2019 to 2022, with their checkpoints.

Each ``main_*`` trains for `epochs`, saves a checkpoint after each one, and starts from the one at
`resume` if that is given. It returns the parameters as lists. (BERT is in ``old_scripts.py``.)
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import amp, optimizers
from apex.amp._amp_state import _amp_state, maybe_print
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model

STEPS = 3


def batches(epoch: int, rank: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    return [torch.randn(*shape, generator=generator) for _ in range(STEPS)]


def save(rank: int, path: str, epoch: int, **parts: Any) -> None:
    if rank == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"epoch": epoch, **states}, path.format(epoch))
    dist.barrier()


def load(resume: str, **parts: Any) -> int:
    """The epoch to start from."""
    if not resume:
        return 0
    checkpoint = torch.load(resume, map_location="cpu")
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    return int(checkpoint["epoch"])


def values(*models: nn.Module) -> list[Any]:
    return [p.detach().float().tolist() for model in models for p in model.parameters()]


# --- apex/examples/imagenet: scaled learning rate, LR schedule by hand, validation ---


def main_imagenet(rank: int, world: int, level: str, path: str, resume: str, epochs: int) -> Any:
    torch.manual_seed(rank)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    )
    criterion = nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=level,
        keep_batchnorm_fp32=True if level == "O2" else None,
        loss_scale="128.0" if level == "O2" else None,
        verbosity=0,
    )
    model = DDP(model, delay_allreduce=True)
    parts: Any = dict(model=model, optimizer=optimizer, amp=amp)
    start = load(resume, **parts)
    for epoch in range(start, epochs):
        model.train()
        for i, images in enumerate(batches(epoch, rank, 4, 3, 4, 4)):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (0.1 ** (epoch // 2)) * (1 + i) / STEPS
            loss = criterion(model(images), torch.arange(4))
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        for buffer in model.buffers():  # each rank has its own statistics, and rank 0 saves
            dist.broadcast(buffer, 0)
        save(rank, path, epoch + 1, **parts)
    return values(model)


# --- apex/examples/dcgan: two models, two optimizers, three losses ---


def main_gan(rank: int, world: int, level: str, path: str, resume: str, epochs: int) -> Any:
    torch.manual_seed(0)
    netG: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    netD: Any = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    criterion = nn.BCEWithLogitsLoss()
    optimizerD: Any = torch.optim.Adam(netD.parameters(), lr=0.02, betas=(0.5, 0.999))
    optimizerG: Any = torch.optim.Adam(netG.parameters(), lr=0.02, betas=(0.5, 0.999))
    [netD, netG], [optimizerD, optimizerG] = amp.initialize(
        [netD, netG], [optimizerD, optimizerG], opt_level=level, num_losses=3, verbosity=0
    )
    netD, netG = DDP(netD), convert_syncbn_model(netG)
    netG = DDP(netG)
    parts: Any = dict(D=netD, G=netG, optD=optimizerD, optG=optimizerG, amp=amp)
    start = load(resume, **parts)
    for epoch in range(start, epochs):
        for real in batches(epoch, rank, 4, 6):
            netD.zero_grad()
            errD_real = criterion(netD(real).view(-1), torch.ones(4))
            with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
                errD_real_scaled.backward()
            fake = netG(real[:, :4])
            errD_fake = criterion(netD(fake.detach()).view(-1), torch.zeros(4))
            with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
                errD_fake_scaled.backward()
            optimizerD.step()
            netG.zero_grad()
            errG = criterion(netD(fake).view(-1), torch.ones(4))
            with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
                errG_scaled.backward()
            optimizerG.step()
        save(rank, path, epoch + 1, **parts)
    return values(netD, netG)


# --- a detector: synchronized batch norm, frozen stem, accumulation, clipping, FusedSGD ---


def main_detection(rank: int, world: int, level: str, path: str, resume: str, epochs: int) -> Any:
    torch.manual_seed(rank)
    model: Any = nn.ModuleDict(
        {
            "stem": nn.Conv2d(3, 4, 3, padding=1),
            "body": nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            "boxes": nn.Conv2d(4, 4, 1),
        }
    )
    model.forward = lambda x: model["boxes"](model["body"](model["stem"](x)))
    model["stem"].requires_grad_(False)
    model = convert_syncbn_model(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = optimizers.FusedSGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapped = DDP(model, message_size=100)
    parts: Any = dict(model=model, optimizer=optimizer, scheduler=scheduler, amp=amp)
    start = load(resume, **parts)
    for epoch in range(start, epochs):
        for images in batches(epoch, rank, 4, 3, 4, 4):
            optimizer.zero_grad()
            for half in images.chunk(2):  # accumulation
                loss = nn.functional.smooth_l1_loss(wrapped(half).float(), half[:, :1]) / 2
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
        scheduler.step()
        save(rank, path, epoch + 1, **parts)
    return values(model)


# --- a script with its own scale_loss, on the inner names of amp ---


@contextlib.contextmanager
def own_scale_loss(loss: Tensor, optimizer: Any, loss_id: int = 0, delay: bool = False) -> Any:
    scaler, stash = _amp_state.loss_scalers[loss_id], optimizer._amp_stash
    if not delay and not stash.params_have_scaled_gradients:
        optimizer._prepare_amp_backward()
    yield loss.float() * scaler.loss_scale()
    if delay:
        stash.params_have_scaled_gradients = True
    else:
        scaler.clear_overflow_state()
        optimizer._post_amp_backward(scaler)
        stash.params_have_scaled_gradients = False
        if scaler.update_scale() and not stash.already_patched:
            step = optimizer.step

            def skip_step(closure: Any = None) -> None:
                maybe_print("Gradient overflow.  Skipping step")
                for param in getattr(stash, "all_fp32_from_fp16_params", []):
                    param.grad = None
                optimizer.step, stash.already_patched = step, False

            optimizer.step, stash.already_patched = skip_step, True
    if _amp_state.opt_properties.patch_torch_functions:
        _amp_state.handle._clear_cache()


def main_own_scale_loss(
    rank: int, world: int, level: str, path: str, resume: str, epochs: int
) -> Any:
    torch.manual_seed(rank)
    model: Any = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
    )
    model = DDP(model)
    parts: Any = dict(model=model, optimizer=optimizer, amp=amp)
    start = load(resume, **parts)
    for epoch in range(start, epochs):
        for number, x in enumerate(batches(epoch, rank, 6, 5)):
            for part in range(3):
                bad = (epoch, number, part) == (0, 1, 0)
                loss = model(x).float().square().mean() * (float("inf") if bad else 0.5)
                with own_scale_loss(loss, optimizer, delay=part < 2) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
            for param in model.parameters():
                param.grad = None
        stash = optimizer._amp_stash
        assert [p for g in stash.fp16_groups for p in g] == stash.all_fp16_params
        save(rank, path, epoch + 1, **parts)
    return values(model) + [_amp_state.loss_scalers[0].loss_scale()]


SCRIPTS = {
    "imagenet": main_imagenet,
    "gan": main_gan,
    "detection": main_detection,
    "own scale_loss": main_own_scale_loss,
}
