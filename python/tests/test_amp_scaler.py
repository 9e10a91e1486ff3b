# SPDX-License-Identifier: BSD-3-Clause
"""The loss scaler's Python interface: policy, attributes, limits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from amp_support import Calls, fresh_amp  # noqa: F401

from apex import amp
from apex.amp import _amp_state
from apex.amp.scaler import LossScaler


def update(scaler: LossScaler, *, overflow: bool) -> bool:
    scaler.unscale_([torch.full((2,), float("inf") if overflow else 1.0)])
    return scaler.update_scale()


def test_dynamic_scaler_follows_the_documented_policy() -> None:
    scaler = LossScaler("dynamic", scale_window=3)
    history = []
    for overflow in (False, False, True, False, False, False, False):
        assert update(scaler, overflow=overflow) is overflow
        history.append((scaler.loss_scale(), scaler._unskipped))
    scales = [2.0**16] * 2 + [2.0**15] * 3 + [2.0**16] * 2
    assert history == list(zip(scales, [1, 2, 0, 1, 2, 0, 1], strict=True))


def test_dynamic_scaler_starts_at_most_at_the_cap_and_keeps_limits() -> None:
    scaler = LossScaler("dynamic", max_loss_scale=1024.0, min_loss_scale=512.0, scale_window=1)
    assert scaler.loss_scale() == 1024.0
    update(scaler, overflow=False)
    assert scaler.loss_scale() == 1024.0
    for _ in range(3):
        update(scaler, overflow=True)
    assert scaler.loss_scale() == 512.0


def test_static_scaler_never_changes_and_never_skips() -> None:
    scaler = LossScaler(128.0)
    assert not update(scaler, overflow=True) and scaler.loss_scale() == 128.0
    assert not scaler.dynamic and LossScaler("dynamic").dynamic
    assert LossScaler(2.0**30).loss_scale() == 2.0**30, "the cap is one of dynamic scales"


def test_scaler_bounds_can_be_written_directly() -> None:
    scaler = LossScaler("dynamic", scale_window=1)
    scaler._loss_scale = scaler._max_loss_scale = 2.0**10
    update(scaler, overflow=False)
    assert scaler.loss_scale() == 2.0**10
    scaler._min_loss_scale = 2.0**9
    for _ in range(3):
        update(scaler, overflow=True)
    assert scaler.loss_scale() == 2.0**9
    copied = copy.deepcopy(scaler)
    assert (copied._min_loss_scale, copied._max_loss_scale) == (2.0**9, 2.0**10)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), "big"])
def test_scaler_impossible_scale_raises(scale: object) -> None:
    with pytest.raises(ValueError):
        LossScaler(scale)


@pytest.mark.parametrize("scale", ["dynamic", 4.0])
def test_scaler_pickled_or_copied_goes_on_where_it_was(scale: object) -> None:
    scaler = LossScaler(scale, scale_window=3, min_loss_scale=2.0, scale_factor=4.0)
    update(scaler, overflow=True)
    update(scaler, overflow=False)
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.state_dict() == scaler.state_dict()
        for _ in range(2):
            update(twin, overflow=False)
        assert twin.loss_scale() == (2.0**16 if scale == "dynamic" else 4.0)


def test_scaler_pickled_by_apex_is_understood() -> None:
    scaler = LossScaler.__new__(LossScaler)
    scaler.__setstate__(
        {
            "dynamic": True,
            "_loss_scale": 32.0,
            "_max_loss_scale": 2.0**24,
            "_min_loss_scale": None,
            "_unskipped": 1999,
            "_has_overflow": False,
            "_overflow_buf": torch.zeros(1, dtype=torch.int32),
            "_scale_seq_len": 2000,
        }
    )
    update(scaler, overflow=False)
    assert scaler.loss_scale() == 64.0


def test_initialize_passes_limits_and_makes_one_scaler_per_loss() -> None:
    model = torch.nn.Linear(2, 2)
    amp.initialize(
        model, opt_level="O2", num_losses=3, min_loss_scale=4.0, max_loss_scale=8.0, verbosity=0
    )
    assert [scaler.loss_scale() for scaler in _amp_state.loss_scalers] == [8.0] * 3
    for _ in range(4):
        update(_amp_state.loss_scalers[1], overflow=True)
    assert [scaler.loss_scale() for scaler in _amp_state.loss_scalers] == [8.0, 4.0, 8.0]


@pytest.mark.parametrize(
    "level, scale, syncs",
    [("O1", "dynamic", 1), ("O2", "dynamic", 1), ("O2", 128.0, 0), ("O2-bf16", None, 0)],
)
def test_iteration_waits_for_the_device_only_to_decide_a_skip(
    level: str, scale: object, syncs: int
) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(5)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=scale, verbosity=0
    )

    def iterate() -> None:
        loss = model(torch.ones(2, 4)).float().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    iterate()
    with Calls() as calls:
        iterate()
    assert calls.names["_local_scalar_dense"] == syncs
    unscales = calls.names["_amp_foreach_non_finite_check_and_unscale_"]
    assert unscales == (1 if _amp_state.loss_scalers[0].dynamic else 0), "not one call for all"


def test_unscale_complex_gradients_in_place_and_finds_nan_in_either_part() -> None:
    scaler = LossScaler("dynamic", init_scale=4.0)
    plain = torch.tensor([4 + 8j, -4j])
    lazy = torch.tensor([4 + 8j]).conj()
    scaler.unscale_([plain, lazy])
    assert torch.equal(plain, torch.tensor([1 + 2j, -1j]))
    assert lazy.is_conj() and torch.equal(lazy.resolve_conj(), torch.tensor([1 - 2j]))
    assert not scaler.update_scale()
    scaler.unscale_([torch.tensor([complex(1, float("nan"))])])
    assert scaler.update_scale()


def test_scale_after_hundreds_of_overflows_is_positive_and_unscales_to_finite_numbers() -> None:
    scaler = LossScaler("dynamic")
    for _ in range(300):
        scaler.unscale_([torch.tensor([float("inf")])])
        assert scaler.update_scale(), "an overflow was not seen"
    assert scaler.loss_scale() == torch.finfo(torch.float32).tiny
    grad = torch.zeros(2)
    scaler.unscale_([grad])
    assert not grad.any() and not scaler.update_scale()
