# SPDX-License-Identifier: BSD-3-Clause
"""apex.parallel.integrations.transformers under the released Trainer of transformers.

The reference is a training loop without a Trainer, in one process, on the samples of all ranks and
micro-batches of a step.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from clients_support import client, load, program_of, run_program
from ddp_support import RankPool, check, check_equal, check_near, check_same_on_all_ranks, raises
from torch import nn
from transformers_support import (
    CLIP,
    EPOCHS,
    Classifier,
    class_loss,
    job,
    language_model,
    logged,
    plain,
    points,
    sliced,
    smoothed_loss,
    texts,
    token_loss,
    trainer,
    translation_model,
    unshifted_loss,
)

from apex.parallel import DistributedDataParallel

pytestmark = [pytest.mark.clients, pytest.mark.processes]
MODULE = "apex.parallel.integrations.transformers"
#: transformers' models compute their loss in float32 for any dtype of the model.
OF_FLOAT32 = 2e-6


@pytest.fixture(autouse=True)
def transformers(request: pytest.FixtureRequest) -> None:
    if "without_transformers" not in request.node.name:
        client("accelerate")
        client("transformers")


def weighted() -> Any:
    load("transformers")
    return load(MODULE).WeightedTrainer


#: Replaces the last line of the page's program: one process, with all samples of each step.
STEPS_OF_ONE = """
import copy

model = copy.deepcopy(trainer.model)
trainer.args.train_sampling_strategy = "sequential"
trainer.args.max_grad_norm = 0.0
trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
trainer.args.lr_scheduler_type = "constant"
trainer.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
for found, step in zip(losses, 3 * [texts[:16], texts[16:]], strict=True):
    if trainer.is_world_process_zero():
        loss = model(**collate(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("LOSS", found, loss.item())
"""


def gap(model: nn.Module, expected: nn.Module, start: nn.Module) -> float:
    """The largest difference of parameters, relative to the largest change in training."""
    differences, changes = [], []
    for found, wanted, old in zip(
        model.parameters(), expected.parameters(), start.parameters(), strict=True
    ):
        differences.append((found - wanted).abs().max().item())
        changes.append((wanted - old).abs().max().item())
    return max(differences) / max(changes)


def check_trained(
    made: Any, result: Any, steps: list[Any], loss_of: Any, tolerance: float = OF_FLOAT32
) -> None:
    """Check that parameters, losses and gradient norms equal those of one process."""
    expected = copy.deepcopy(made.start)
    losses, norms = plain(expected, steps, loss_of)
    check(CLIP < max(norms), f"clipping is not tested by {norms}")
    difference = gap(made.model, expected, made.start)
    check(difference <= tolerance, f"parameters are {difference:.3g} off")
    for name, wanted in (("loss", losses), ("grad_norm", norms)):
        # The Trainer sums losses in float32.
        found = torch.tensor(logged(made, name), dtype=torch.float64)
        check_near(found, torch.tensor(wanted, dtype=torch.float64), name, OF_FLOAT32)
    mean = sum(losses) / len(losses)
    check(abs(result.training_loss - mean) < OF_FLOAT32 * mean, f"train_loss {result}, not {mean}")


def _trains(rank: int, world: int, accumulated: int) -> None:
    samples = texts(20 if world == 2 else 24)
    with job(rank, world):
        made = trainer(
            weighted(), language_model(), samples, gradient_accumulation_steps=accumulated
        )
        result = made.train()
        check_equal(type(made.model_wrapped), DistributedDataParallel, "the wrapper")
        statistics = made.model_wrapped.statistics()
    steps = EPOCHS * sliced(samples, 2 * accumulated * world)
    check_equal(statistics["backwards"], len(steps), f"synchronized of {statistics}")
    check_trained(made, result, steps, token_loss)
    check_same_on_all_ranks(list(made.model.parameters()), "parameters")


@pytest.mark.parametrize("world, accumulated", [(1, 3), (2, 1), (2, 2), (3, 3)])
def test_trainer_on_ranks_equals_one_process_with_all_tokens(
    ranks: RankPool, world: int, accumulated: int
) -> None:
    """Of 5 micro-batches (with 3 ranks, of 4), the last step has one."""
    ranks.run(world, _trains, accumulated)


def _is_off(rank: int, world: int) -> None:
    samples = texts(20)
    with job(rank, world):
        made = trainer(
            load("transformers").Trainer, language_model(), samples,
            gradient_accumulation_steps=2, average_tokens_across_devices=False,
        )  # fmt: skip
        result = made.train()
    steps = EPOCHS * sliced(samples, 4 * world)
    expected = language_model()
    plain(expected, steps, token_loss)
    found = gap(made.model, expected, language_model())
    check(found > 0.05, f"the mean of the ranks' means is only {found} off")
    with raises(AssertionError, "parameters are"):
        check_trained(made, result, steps, token_loss)


def test_negative_control_mean_of_means_is_off(ranks: RankPool) -> None:
    ranks.run(2, _is_off)


def mean_of_tokens(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    check(num_items_in_batch is None, "a loss that is divided already")
    return token_loss(outputs["logits"], labels)


def _takes_losses(rank: int, world: int) -> None:
    samples = texts(20)
    steps = EPOCHS * sliced(samples, 4 * world)
    of_double: dict[str, Any] = {"compute_loss_func": mean_of_tokens}
    for options, loss_of, tolerance in (
        (of_double, token_loss, 1e-11),
        ({"label_smoothing_factor": 0.1}, smoothed_loss, OF_FLOAT32),
    ):
        with job(rank, world):
            made = trainer(
                weighted(), language_model(), samples, gradient_accumulation_steps=2, **options
            )
            result = made.train()
        check_trained(made, result, steps, loss_of, tolerance)


def test_loss_function_in_float64_and_label_smoothing_equal_one_process(ranks: RankPool) -> None:
    ranks.run(2, _takes_losses)


def _translates(rank: int, world: int) -> None:
    base = weighted()

    class Translates(base, load("transformers").Seq2SeqTrainer):  # type: ignore[misc, valid-type]
        pass

    samples = texts(20)
    with job(rank, world):
        made = trainer(Translates, translation_model(), samples, gradient_accumulation_steps=2)
        result = made.train()
    check_trained(made, result, EPOCHS * sliced(samples, 4 * world), unshifted_loss)


def test_derived_trainer_of_an_encoder_and_decoder_equals_one_process(ranks: RankPool) -> None:
    ranks.run(2, _translates)


def _has_unequal_batches(rank: int, world: int) -> None:
    """Rank 0 has five micro-batches, the last with one sample. Rank 1 has four."""
    samples = points(17)
    base = weighted()

    class OwnLoss(base):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **options) * 0.9

    with job(rank, world):
        made = trainer(
            OwnLoss, Classifier(), samples, gradient_accumulation_steps=3,
            accelerator_config={"even_batches": False},
        )  # fmt: skip
        result = made.train()
    check_trained(
        made, result, EPOCHS * sliced(samples, 12), lambda x, y: class_loss(x, y) * 0.9, 1e-11
    )


def test_own_model_and_loss_with_unequal_batches_equal_one_process(ranks: RankPool) -> None:
    ranks.run(2, _has_unequal_batches)


def _lacks_labels(rank: int, world: int) -> None:
    samples = texts(20, unlabeled=range(2, 4))  # the first micro-batch of rank 1
    with job(rank, world):
        made = trainer(weighted(), language_model(), samples)
        result = made.train()
    check_trained(made, result, EPOCHS * sliced(samples, 2 * world), token_loss)


def test_micro_batch_without_labels_counts_nothing(ranks: RankPool) -> None:
    ranks.run(2, _lacks_labels)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


def _streams(rank: int, world: int) -> None:
    """The length of an epoch is unknown, so the Trainer does not step at its end."""
    samples = texts(20)
    with job(rank, world):
        made = trainer(
            weighted(), language_model(), Stream(samples), gradient_accumulation_steps=2,
            max_steps=4, accelerator_config={"dispatch_batches": False},
        )  # fmt: skip
        result = made.train()
    rest = samples[16:]
    check_trained(
        made, result, [samples[:8], samples[8:16], rest + samples[:8], samples[8:16]], token_loss
    )


def test_rest_of_a_stream_is_part_of_the_next_step(ranks: RankPool) -> None:
    ranks.run(2, _streams)


def test_process_that_is_no_rank_trains_alone_with_the_same_result() -> None:
    samples = texts(10)
    with job():
        made = trainer(weighted(), language_model(), samples, gradient_accumulation_steps=2)
        result = made.train()
        assert made.model_wrapped is made.model
        check_trained(made, result, EPOCHS * sliced(samples, 4), token_loss)


def _resumes(rank: int, world: int, folder: str) -> None:
    samples = texts(20)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    with job(rank, world):
        whole = trainer(weighted(), language_model(), samples, **options)
        whole.train()
    with job(rank, world):
        first = trainer(
            weighted(),
            language_model(),
            samples,
            folder,
            save_strategy="steps",
            save_steps=4,
            **options,
        )
        first.eval_dataset = samples
        before = first.evaluate()["eval_loss"]  # before the model is wrapped
        first.train()
        check_equal(type(first.model_wrapped), DistributedDataParallel, "after an evaluation")
        check(first.evaluate()["eval_loss"] < before, "no progress")
        check(first.accelerator.unwrap_model(first.model_wrapped) is first.model, "not unwrapped")
    with job(rank, world):
        again = trainer(weighted(), language_model(), samples, folder, **options)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    for name, tensor in again.model.named_parameters():
        check_equal(tensor, whole.model.get_parameter(name), name)
        check_equal(first.model.get_parameter(name), tensor, name)


def test_evaluated_saved_and_resumed_equals_the_run_that_was_not_bitwise(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, _resumes, str(tmp_path))


def _reads_through(rank: int, world: int, folder: str) -> None:
    """What scripts call on a model of transformers, on the wrapped one."""
    ddp = DistributedDataParallel(language_model())
    model = ddp.module
    check(ddp.config is model.config and ddp.dtype == torch.float64, "attributes")
    tokens = torch.tensor([[1, 2, 3]])
    generated = [
        one.eval().generate(input_ids=tokens, max_new_tokens=3, do_sample=False)
        for one in (ddp, model)
    ]
    check_equal(generated[0], generated[1], "generated")
    ddp.train()
    ddp.gradient_checkpointing_enable()
    ddp(input_ids=tokens, labels=tokens).loss.backward()
    check(model.is_gradient_checkpointing, "checkpointing")
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], "gradients")
    if rank == 0:
        ddp.save_pretrained(folder)
        read = type(model).from_pretrained(folder)
        for name, tensor in model.state_dict().items():
            check_equal(read.state_dict()[name], tensor, name)


def test_methods_of_a_model_are_called_on_its_wrapper(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _reads_through, str(tmp_path))


def test_program_of_the_page_logs_the_mean_over_all_labels(tmp_path: Path) -> None:
    code = program_of("libraries.md", "WeightedTrainer").replace("trainer.train()", STEPS_OF_ONE)
    printed = run_program(code, 2, tmp_path)
    pairs = re.findall(r"^LOSS (\S+) (\S+)$", printed, re.M)
    assert len(pairs) == 6  # two steps in each of three epochs
    for found, expected in pairs:
        assert abs(float(found) - float(expected)) < 1e-5, pairs


def test_several_devices_in_a_process_are_refused() -> None:
    kind = weighted()

    class TwoDevices(kind):  # type: ignore[misc, valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            self.args._n_gpu = 2
            super().create_accelerator_and_postprocess()

    with job(), pytest.raises(ValueError, match="one process for each GPU"):
        trainer(TwoDevices, Classifier(), points(4))


def test_without_transformers_the_import_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs with and without transformers installed."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    for name in ("accelerate", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs the packages transformers.*pip install"):
        importlib.import_module(MODULE)
