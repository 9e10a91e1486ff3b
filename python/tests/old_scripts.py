# SPDX-License-Identifier: BSD-3-Clause
"""Miniature training scripts that make the same calls as NVIDIA's DeepLearningExamples.

SSD, BERT pretraining, Tacotron2 and ResNet-50: their imports, setup and training steps, with models
and data of a few hundred numbers. Each ``train_*`` runs on one rank of ``world``, on that rank's
slice of a batch, and returns the losses of the whole batch by step.
"""

from __future__ import annotations

import argparse
import copy
import io
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import amp_C
import apex_C
from apex import amp
from apex.amp import _amp_state
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam, FusedLAMB
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model
from apex.parallel.distributed import flat_dist_call
from apex.parallel.LARC import LARC


def reduce_tensor(tensor: Tensor, world: int) -> float:
    total = tensor.detach().clone().float()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return (total / world).item()


def part(batch: Tensor, rank: int, world: int) -> Tensor:
    return batch.chunk(world)[rank]


# --- SSD: two heads, groups without decay, O2, warm-up by hand, a checkpoint of the bare model ---


class Detector(nn.Module):
    def __init__(self, classes: int = 3, boxes: int = 4) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
        )
        self.loc = nn.Conv2d(8, 4 * boxes, 2)
        self.conf = nn.Conv2d(8, classes * boxes, 2)
        self.classes = classes

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(images)
        locations = self.loc(features).view(len(images), 4, -1)
        return locations, self.conf(features).view(len(images), self.classes, -1)


def groups_with_and_without_decay(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    without, others = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            (without if param.dim() == 1 or name.endswith(".bias") else others).append(param)
    return [{"params": without, "weight_decay": 0.0}, {"params": others, "weight_decay": decay}]


def train_ssd(rank: int, world: int, level: str, steps: int = 12) -> list[float]:
    torch.manual_seed(10 + rank)  # the wrapper broadcasts rank 0's
    ssd = Detector()
    optimizer = torch.optim.SGD(
        groups_with_and_without_decay(ssd, 5e-4), lr=0.2, momentum=0.9, weight_decay=5e-4
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[10], gamma=0.1)
    ssd, optimizer = amp.initialize(ssd, optimizer, opt_level=level, verbosity=0)
    ssd = DDP(ssd)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 8, 8, generator=generator)
    boxes = torch.randn(8, 4, 4, generator=generator)
    labels = torch.randint(3, (8, 4), generator=generator)
    losses = []
    for iteration in range(steps):
        ploc, plabel = ssd(part(images, rank, world))
        ploc, plabel = ploc.float(), plabel.float()
        loss = F.smooth_l1_loss(ploc, part(boxes, rank, world))
        loss = loss + F.cross_entropy(plabel, part(labels, rank, world))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if iteration < 3:  # warm-up
            for group in optimizer.param_groups:
                group["lr"] = 0.2 * (iteration + 1) / 3
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(reduce_tensor(loss, world))
    saved = io.BytesIO()
    torch.save({"model": ssd.module.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    fresh = Detector()
    fresh.load_state_dict(torch.load(saved)["model"])  # float32 at every level
    assert all(p.dtype == torch.float32 for p in fresh.parameters())
    same_on_all_ranks(amp.master_params(optimizer), world)
    return losses


# --- BERT: LAMB, accumulation, the script's own all-reduce, its schedule, and a resumed run ---


class Bert(nn.Module):
    def __init__(self, vocabulary: int = 17, width: int = 8) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.attention = nn.Linear(width, 3 * width)
        self.LayerNorm = FusedLayerNorm(width, eps=1e-12)
        self.dense = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        q, k, v = self.attention(x).chunk(3, dim=-1)
        x = x + F.softmax(q @ k.transpose(1, 2) / math.sqrt(q.size(-1)), dim=-1) @ v
        x = F.gelu(self.dense(self.LayerNorm(x)))
        return F.linear(x, self.embeddings.weight, self.bias)  # shared with the embedding


class PolyWarmUpScheduler(torch.optim.lr_scheduler.LRScheduler):
    """Uses the optimizer's own count of steps, which overflows do not increment."""

    def __init__(self, optimizer: Any, warmup: float, total_steps: int) -> None:
        self.warmup, self.total_steps = warmup, total_steps
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        group = self.optimizer.param_groups[0]
        self.last_epoch = group["step"] + 1 if "step" in group else 1
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr

    def get_lr(self) -> list[float]:
        progress = self.last_epoch / self.total_steps
        if progress < self.warmup:
            return [base * progress / self.warmup for base in self.base_lrs]
        return [base * (1.0 - progress) ** 0.5 for base in self.base_lrs]


def prepare_bert(
    rank: int, world: int, args: argparse.Namespace, checkpoint: dict[str, Any] | None
) -> tuple[Any, Any, Any]:
    torch.manual_seed(42 + rank)
    model = Bert()
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"], strict=False)
    no_decay = ("bias", "LayerNorm")
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if not any(k in n for k in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in named if any(k in n for k in no_decay)], "weight_decay": 0.0},
    ]
    kind = {"lamb": FusedLAMB, "adam": FusedAdam}[args.optimizer]
    options = {"bias_correction": False} if kind is FusedAdam else {}
    optimizer = kind(groups, lr=args.learning_rate, **options)
    scheduler = PolyWarmUpScheduler(optimizer, warmup=0.2, total_steps=args.max_steps)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.level, loss_scale="dynamic", verbosity=0
    )
    amp._amp_state.loss_scalers[0]._loss_scale = args.init_loss_scale
    if checkpoint is not None:
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_stash.lazy_init_called = True
        optimizer.load_state_dict(checkpoint["optimizer"])
        masters = amp.master_params(optimizer)
        for param, saved in zip(masters, checkpoint["master params"], strict=True):
            param.data.copy_(saved.data)
        optimizer._master_params_to_model_params()
        amp.load_state_dict(checkpoint["amp"])
    if args.allreduce_post_accumulation:
        flat_dist_call([param.data for param in model.parameters()], dist.broadcast, (0,))
    else:
        model = DDP(model, message_size=250000000, gradient_predivide_factor=world)
    return model, optimizer, scheduler


def take_optimizer_step(
    args: argparse.Namespace, optimizer: Any, model: nn.Module, overflow_buf: Tensor, world: int
) -> int:
    if not args.allreduce_post_accumulation:
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        return 1
    scaler = _amp_state.loss_scalers[0]
    loss_scale = scaler.loss_scale()
    grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat = torch.empty(sum(g.numel() for g in grads), dtype=torch.float32)
    views = apex_C.unflatten(flat, grads)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(
        65536, overflow_buf, [grads, views], loss_scale / (world * args.accumulation)
    )
    dist.all_reduce(flat)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(65536, overflow_buf, [views, grads], 1.0 / loss_scale)
    old_overflow_buf, scaler._overflow_buf = scaler._overflow_buf, overflow_buf
    had_overflow = scaler.update_scale()
    scaler._overflow_buf = old_overflow_buf
    if had_overflow:
        if _amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
    else:
        optimizer.step()
    for param in model.parameters():
        param.grad = None
    return 0 if had_overflow else 1


def train_bert(*args: Any) -> list[float]:
    return run_bert(*args)[0]


def bert_parameters(*args: Any) -> list[Any]:
    return [p.detach().tolist() for p in run_bert(*args)[1].parameters()]


def run_bert(
    rank: int,
    world: int,
    level: str,
    optimizer_name: str = "lamb",
    post: bool = True,
    steps: int = 12,
    stop: int | None = None,
    scale: float = 2.0**10,
) -> tuple[list[float], nn.Module]:
    args = argparse.Namespace(
        level=level, optimizer=optimizer_name, allreduce_post_accumulation=post, max_steps=20,
        learning_rate=0.05, init_loss_scale=scale, accumulation=2,
    )  # fmt: skip
    model, optimizer, scheduler = prepare_bert(rank, world, args, None)
    overflow_buf = torch.zeros(1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(17, (2, 4, 6), generator=generator)
    losses: list[float] = []
    done = 0
    while done < steps:
        total = 0.0
        for micro in range(args.accumulation):
            mine = part(ids[micro], rank, world)
            scores = model(mine)
            loss = F.cross_entropy(scores.float().flatten(0, 1), mine.flatten())
            total += reduce_tensor(loss, world) / args.accumulation
            if not post:
                loss = loss / args.accumulation
            with amp.scale_loss(loss, optimizer, delay_overflow_check=post) as scaled_loss:
                scaled_loss.backward()
        scheduler.step()  # sets the learning rate of this step
        stepped = take_optimizer_step(args, optimizer, model, overflow_buf, world)
        done += stepped
        if stepped:
            losses.append(total)
        if done == stop and stepped:
            bare = model.module if hasattr(model, "module") else model
            masters = list(amp.master_params(optimizer))
            saved = {
                "model": bare.state_dict(),
                "optimizer": optimizer.state_dict(),
                "master params": masters,
                "amp": amp.state_dict(),
            }
            saved = copy.deepcopy(saved)
            model, optimizer, scheduler = prepare_bert(rank, world, args, saved)
    assert optimizer.param_groups[0]["step"] >= steps
    assert 0 < optimizer.param_groups[0]["lr"] < args.learning_rate
    same_on_all_ranks(amp.master_params(optimizer), world)
    return losses, model


# --- Tacotron2: softmax moved to float16, recurrent cells, clipping, amp's state saved ---


class Tacotron(nn.Module):
    def __init__(self, symbols: int = 11, width: int = 8, mels: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.convolution = nn.Sequential(
            nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU()
        )
        self.encoder = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.attention_rnn = nn.LSTMCell(width + mels, width)
        self.decoder_rnn = nn.LSTMCell(2 * width, width)
        self.projection = nn.Linear(2 * width, mels)
        self.gate = nn.Linear(2 * width, 1)
        self.attention_types: set[torch.dtype] = set()

    def forward(self, text: Tensor, mel: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.convolution(self.embedding(text).transpose(1, 2)).transpose(1, 2)
        memory, _ = self.encoder(memory)
        context = memory.new_zeros(len(text), memory.size(2))
        frame = mel.new_zeros(len(text), mel.size(2))
        first: Any = None
        second: Any = None
        mels, gates = [], []
        for step in range(mel.size(1)):
            first = self.attention_rnn(torch.cat((frame, context), 1), first)
            energies = torch.bmm(memory, first[0].unsqueeze(2)).squeeze(2)
            weights = F.softmax(energies, dim=1)
            self.attention_types.add(weights.dtype)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            second = self.decoder_rnn(torch.cat((first[0], context), 1), second)
            out = torch.cat((second[0], context), 1)
            mels.append(self.projection(out))
            gates.append(self.gate(out))
            frame = mel[:, step]
        return torch.stack(mels, 1), torch.cat(gates, 1)


def train_tacotron(rank: int, world: int, level: str, steps: int = 12) -> list[float]:
    overrides = amp.lists.functional_overrides
    before = list(overrides.FP16_FUNCS), list(overrides.FP32_FUNCS)
    overrides.FP32_FUNCS.remove("softmax")
    overrides.FP16_FUNCS.append("softmax")
    try:
        torch.manual_seed(1234)
        model = Tacotron()
        types = model.attention_types
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-6)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        model = DDP(model)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(11, (4, 5), generator=generator)
        mel = torch.randn(4, 6, 5, generator=generator)
        gate = torch.tensor([0.0, 0, 0, 0, 0, 1]).expand(4, 6)
        losses = []
        for step in range(steps):
            model.zero_grad()
            mine = part(mel, rank, world)
            mel_out, gate_out = model(part(text, rank, world), mine)
            loss = F.mse_loss(mel_out, mine)
            loss = loss + F.binary_cross_entropy_with_logits(gate_out, part(gate, rank, world))
            losses.append(reduce_tensor(loss.data, world))
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            assert norm.isfinite() or amp.state_dict()["loss_scaler0"]["unskipped"] == 0
            optimizer.step()
            if step == steps // 2:
                file = io.BytesIO()
                torch.save(
                    {
                        "state_dict": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "amp": amp.state_dict(),
                    },
                    file,
                )
                file.seek(0)
                checkpoint = torch.load(file)
                model.load_state_dict(checkpoint["state_dict"])
                optimizer.load_state_dict(checkpoint["optimizer"])
                amp.load_state_dict(checkpoint["amp"])
        assert types == ({torch.float16} if level == "O1" else {torch.float32}), types
        same_on_all_ranks(amp.master_params(optimizer), world)
        return losses
    finally:
        overrides.FP16_FUNCS[:], overrides.FP32_FUNCS[:] = before


# --- ResNet-50: synchronized batch norm, LARC, a static or dynamic scale, delayed all-reduce ---


class Bottleneck(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(outer, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outer, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + x)


def train_resnet(
    rank: int, world: int, level: str, loss_scale: str | None = None, steps: int = 10
) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Bottleneck(4, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    model = convert_syncbn_model(model).to(memory_format=torch.channels_last)
    optimizer: Any = torch.optim.SGD(
        groups_with_and_without_decay(model, 1e-4), lr=0.5, momentum=0.9
    )
    optimizer = LARC(optimizer, trust_coefficient=0.05, clip=True)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=level,
        keep_batchnorm_fp32="True" if level == "O2" else None,
        loss_scale=loss_scale,
        verbosity=0,
    )
    model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    target = torch.randint(4, (8,), generator=generator)
    losses = []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * min(1.0, (step + 1) / 3)
        output = model(part(images, rank, world))
        loss = criterion(output, part(target, rank, world))
        losses.append(reduce_tensor(loss.data, world))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        assert model(images).isfinite().all()
    same_on_all_ranks([*amp.master_params(optimizer), *model.buffers()], world)
    return losses


def same_on_all_ranks(tensors: Any, world: int) -> None:
    """Check that every tensor is bitwise equal on all ranks."""
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor.detach())
