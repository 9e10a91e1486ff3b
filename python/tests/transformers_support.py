# SPDX-License-Identifier: BSD-3-Clause
"""Models, data and Trainers of transformers, and a one-process reference on the whole batches."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from clients_support import load
from torch import Tensor, nn

TOKENS, LENGTH, RATE, CLIP, EPOCHS = 17, 14, 0.5, 0.6, 2
Loss = Callable[[Tensor, Tensor], Tensor]


def language_model() -> Any:
    transformers = load("transformers")
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH + 2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).double()


def translation_model() -> Any:
    """Its loss uses every label, without shifting."""
    transformers = load("transformers")
    config = transformers.T5Config(
        vocab_size=TOKENS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config).double()


class Classifier(nn.Module):
    """Not a model of transformers. Its loss is always the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.net(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def texts(count: int, unlabeled: range = range(0)) -> list[dict[str, Tensor]]:
    """Texts of different lengths. Some have ignored first labels, and `unlabeled` ones have no
    labels."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index in range(count):
        length = int(torch.randint(2, LENGTH, (1,), generator=generator))
        tokens = torch.randint(TOKENS, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length if index in unlabeled else length // 3] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def points(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return [{"x": row, "labels": (row.sum().abs() * 2).long().clamp(max=3)} for row in x]


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collator that pads sequences at the end."""
    if "input_ids" not in samples[0]:
        return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}
    masked = [{**s, "attention_mask": torch.ones_like(s["input_ids"])} for s in samples]
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: nn.utils.rnn.pad_sequence([s[name] for s in masked], True, value)
        for name, value in fill.items()
    }


def token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def smoothed_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
    )


def unshifted_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def class_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, labels)


def plain(
    model: nn.Module, steps: list[list[dict[str, Tensor]]], loss_of: Loss
) -> tuple[list[float], list[float]]:
    """The reference: one process without a Trainer. Returns each step's loss and gradient norm.

    `steps` has the samples of each optimizer step, of all ranks and micro-batches.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, norms = [], []
    for samples in steps:
        batch = padded(samples)
        loss = loss_of(model(**batch)["logits"], batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def sliced(samples: list[Any], size: int) -> list[list[Any]]:
    """The samples of each step. The Trainer assigns consecutive batches to the ranks in turn."""
    return [samples[begin : begin + size] for begin in range(0, len(samples), size)]


@contextlib.contextmanager
def job(rank: int = 0, world: int = 0) -> Iterator[None]:
    """Make transformers treat this process as torchrun's rank, or as a single process with 0
    ranks."""
    values = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if world > 0:
        values |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
    state = load("accelerate.state")
    with mock.patch.dict(os.environ, values):
        try:
            yield
        finally:  # accelerate's state of a job in this process
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def trainer(
    kind: Any, model: nn.Module, samples: Any, folder: Any = "unused", **options: Any
) -> Any:
    """A Trainer of class `kind` that writes nothing, with plain SGD, and without shuffling."""
    transformers = load("transformers")
    of_trainer = {"compute_loss_func": options.pop("compute_loss_func", None)}
    common = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "logging_steps": 1, "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential", "label_names": ["labels"],
        "num_train_epochs": EPOCHS, "per_device_train_batch_size": 2, "max_grad_norm": CLIP,
    }  # fmt: skip
    arguments = transformers.TrainingArguments
    if issubclass(kind, transformers.Seq2SeqTrainer):
        arguments = transformers.Seq2SeqTrainingArguments
    start = copy.deepcopy(model)
    made = kind(
        model=model,
        args=arguments(**{**common, **options}),
        train_dataset=samples,
        data_collator=padded,
        optimizers=(torch.optim.SGD(model.parameters(), lr=RATE), None),
        **of_trainer,
    )
    made.start = start  # the model before training
    made.remove_callback(transformers.PrinterCallback)
    return made


def logged(made: Any, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]
