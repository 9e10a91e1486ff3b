# SPDX-License-Identifier: BSD-3-Clause
"""A ``Trainer`` of transformers whose results are those of one process with all ranks' batches.

Like transformers' own ``Trainer``, it needs the packages ``transformers`` and ``accelerate``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from apex.parallel.distributed import DistributedDataParallel

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ModuleNotFoundError as error:
    raise ImportError(
        "apex.parallel.integrations.transformers needs the packages transformers and accelerate, "
        f"which cannot be imported ({error}): pip install transformers accelerate."
    ) from error

__all__ = ["WeightedTrainer"]

_IGNORED = -100  # the label that every loss of transformers ignores


class _Accelerator(Accelerator):
    """Wraps the model in apex's wrapper instead of torch's."""

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        alone = self.distributed_type == DistributedType.NO
        if evaluation_mode or alone or not _trains(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        # Accelerate handles autocast, device and compilation.
        module = super().prepare_model(model, device_placement, evaluation_mode=True)
        options = {} if self.ddp_handler is None else self.ddp_handler.to_kwargs()
        wrapped: Any = DistributedDataParallel(module, gradient_average="weighted", **options)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        wrapped._is_accelerate_prepared = True
        return wrapped

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        return super().unwrap_model(model, *args, **kwargs)


def _trains(model: nn.Module) -> bool:
    return not isinstance(model, DistributedDataParallel) and any(
        parameter.requires_grad for parameter in model.parameters()
    )


class WeightedTrainer(Trainer):
    """transformers' ``Trainer`` with :class:`apex.parallel.DistributedDataParallel`.

    The gradient of each optimizer step is that of the mean loss over all labels of all ranks and of
    all micro-batches of ``gradient_accumulation_steps``, for any numbers of labels. The gradient
    norm, clipping and the logged loss use that gradient and mean.

    The model's loss must be a mean over the items of one micro-batch, and :meth:`count_items` must
    return the number of these items. ``num_items_in_batch`` is not passed to the model,
    ``compute_loss`` or ``compute_loss_func``, so they return such a mean.

    Takes the arguments of ``Trainer``, and the ``ddp_*`` options of ``TrainingArguments``.
    ``average_tokens_across_devices`` has no effect on training. A class derived from ``Trainer``
    can be combined with it: ``class MyTrainer(WeightedTrainer, Seq2SeqTrainer): pass``. A process
    outside of a distributed job trains alone, with the same results.

    Raises:
        ValueError: with FSDP, DeepSpeed, tensor or context parallelism, or several GPUs in one
            process.
    """

    accelerator: Any  # set by Trainer
    _summed_loss: Any = 0.0  # of this rank since the last synchronized backward

    def create_accelerator_and_postprocess(self) -> None:
        """Called by ``Trainer`` when it is constructed."""
        super().create_accelerator_and_postprocess()
        if (
            self.is_fsdp_enabled
            or self.is_deepspeed_enabled
            or getattr(self.accelerator, "parallelism_config", None) is not None
            or self.args.n_gpu > 1
        ):
            raise ValueError(
                "WeightedTrainer supports only data parallelism with one device per process: "
                "remove FSDP, DeepSpeed and parallelism_config, and start one process for each GPU "
                "(torchrun)."
            )
        # The Trainer constructs its Accelerator itself, from arguments that it does not keep.
        self.accelerator.__class__ = _Accelerator

    def count_items(self, inputs: Any) -> Tensor:
        """The number of items over which the loss of a micro-batch is a mean.

        Override it for a loss that is a mean over something else. By default, it counts the labels
        that are not -100. If the model's loss shifts labels, the first label of each sequence is
        not counted. Without a tensor of labels, it is the number of samples.

        Args:
            inputs: the micro-batch, as the data loader returns it.

        Returns:
            A tensor of shape ``[]``, on the device of the labels. If it is 0, the loss may be NaN,
            but its gradient must be finite, as with ``cross_entropy``.
        """
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = inputs.get("labels")
            if isinstance(labels, Tensor) and labels.dim() > 1 and self._shifts_labels():
                labels = labels[..., 1:]
        if isinstance(labels, Tensor):
            return labels.ne(_IGNORED).sum()
        samples = labels if labels is not None else next(iter(inputs.values()))
        return torch.tensor(len(samples), device="cpu")

    def _shifts_labels(self) -> bool:
        # Trainer's own flag misses GPT2LMHeadModel and other classes that are not named after a
        # loss. They use the loss of causal models by default.
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        return self._loss_shifts_labels or (
            type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            and not getattr(model.config, "is_encoder_decoder", False)
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.train``."""
        self._summed_loss = 0.0  # an earlier call may have ended in the middle of a step
        return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and the number of items in them on this process."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, sum(self.count_items(batch) for batch in batches)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of one micro-batch.

        For the last micro-batch of a step, returns the mean loss of the step, the same on every
        rank. For the others, returns 0. The Trainer sums these values for its log. The last
        micro-batch of a step is collective.
        """
        model.train()
        # for schedule-free optimizers
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        inputs = self._prepare_inputs(inputs)
        items = self.count_items(inputs)  # compute_loss() may remove the labels
        with self.compute_loss_context_manager():
            mean = self.compute_loss(model, inputs)
        # a sum may exceed the range of float16
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
        items = items.to(mean.device)
        # A mean over no items is NaN.
        loss: Tensor = torch.where(items > 0, mean * items, torch.zeros_like(mean))
        if not isinstance(model, DistributedDataParallel):
            loss = loss / num_items_in_batch.to(loss.device).clamp(min=1)
            self.accelerator.backward(loss)
            return loss.detach()
        last = self.accelerator.sync_gradients
        with contextlib.nullcontext() if last else model.no_sync(), model.weight(items):
            self.accelerator.backward(loss)
        self._summed_loss = self._summed_loss + loss.detach()
        if not last:
            return torch.zeros_like(self._summed_loss)
        summed, self._summed_loss = self._summed_loss, 0.0
        mean_of_all: Tensor = model.weighted_mean(summed)
        return mean_of_all
