# SPDX-License-Identifier: BSD-3-Clause
"""Names that Apex scripts import, pass as keywords or access internally, and their effect."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import Tensor, nn

import amp_C
from apex import amp, fp16_utils
from apex.amp import _amp_state
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from apex.amp.scaler import LossScaler
from apex.parallel import distributed

# --- imports ---


def test_imports_stand_alone() -> None:
    # In a separate process, because other tests here have imported submodules.
    lines = """
import amp_C, apex_C
amp_C.multi_tensor_scale, apex_C.flatten, apex_C.unflatten
import apex
apex.parallel.LARC.LARC, apex.amp.scaler.LossScaler, apex.amp.frontend.O1
apex.amp.lists.functional_overrides.FP32_FUNCS, apex.amp.compat, apex.amp.rnn_compat
from apex.contrib.optimizers import FusedAdam, FusedSGD
assert apex.amp.compat.is_tensor_like(apex.amp.compat.torch.ones(1))
"""
    # A CPU build with a CUDA build of torch warns about it, as intended.
    strict = ["-W", "error::RuntimeWarning", "-W", "ignore:torch:RuntimeWarning"]
    done = subprocess.run([sys.executable, *strict, "-c", lines])
    assert done.returncode == 0


# --- keywords ---


def test_keywords_are_apexs() -> None:
    assert fp16_utils.to_python_float(t=torch.tensor([1.5])) == 1.5

    class Library:
        @staticmethod
        def twice(x: Tensor) -> Tensor:
            return x + x

    amp.register_half_function(module=Library, name="twice")
    amp.init()
    try:
        assert Library.twice(torch.ones(2)).dtype == torch.float16
        assert amp.float_function(fn=lambda x: x)(torch.ones(2).half()).dtype == torch.float32
    finally:
        _amp_state.handle._deactivate()


# --- apex.parallel.distributed ---


def test_split_by_type_and_by_precision() -> None:
    kinds = (
        torch.float32,
        torch.float16,
        torch.int64,
        torch.float64,
        torch.bfloat16,
        torch.float32,
    )
    tensors = [torch.zeros(i + 1, dtype=kind) for i, kind in enumerate(kinds)]
    by_type = distributed.split_by_type(tensors)
    assert list(by_type) == list(dict.fromkeys(t.type() for t in tensors))
    assert [t.numel() for t in by_type["torch.FloatTensor"]] == [1, 6]
    halves, floats, doubles, brains = distributed.split_half_float_double(tensors)
    assert [len(halves), len(floats), len(doubles), len(brains)] == [1, 2, 1, 1]
    assert distributed.split_half_float_double(tensors[:1]) == [tensors[:1]]
    assert distributed.split_half_float_double([]) == []


def test_extract_tensors_from_nested_iterables() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(2, 2)
    found: list[Tensor] = []
    distributed.extract_tensors([a, (b, [c]), "text", 3, None], found)
    assert len(found) == 3 and found[0] is a and found[1] is b and found[2] is c


# --- the loss scaler ---


@pytest.mark.parametrize("kind", ["dynamic", 8.0], ids=str)
@pytest.mark.parametrize("grads", [torch.float16, torch.float32], ids=str)
def test_unscale_writes_the_masters_and_notes_overflow(kind: Any, grads: torch.dtype) -> None:
    scaler = LossScaler(kind, init_scale=8.0)
    model = [torch.full((3,), 4.0, dtype=grads), torch.full((2, 2), -2.0, dtype=grads)]
    masters = [torch.empty(3), torch.empty(2, 2)]
    scaler.unscale(model, masters, scaler.loss_scale())
    assert masters[0].tolist() == [0.5] * 3 and masters[1].unique().tolist() == [-0.25]
    assert not scaler._has_overflow and not scaler.update_scale()
    scaler.unscale(model, masters, None, models_are_masters=False, scale_override=4.0)
    assert masters[0].tolist() == [1.0] * 3
    same = [torch.full((2,), 8.0)]
    scaler.unscale(same, same, scaler.loss_scale(), models_are_masters=True)
    assert same[0].tolist() == [1.0, 1.0]
    model[1][0, 1] = math.nan
    scaler.clear_overflow_state()
    scaler.unscale(model, masters, scaler.loss_scale())
    dynamic = kind == "dynamic"
    assert scaler.update_scale() == dynamic
    assert scaler.loss_scale() == (4.0 if dynamic else 8.0)
    assert scaler._has_overflow == dynamic  # the last decision, until the next loss
    scaler.scale(torch.ones(()))
    assert not scaler._has_overflow


@pytest.mark.parametrize("override", [None, (2.0, 4.0, 1.0)])
def test_unscale_with_stashed_adds_what_was_kept(override: Any) -> None:
    scaler = LossScaler("dynamic", init_scale=8.0)
    model, stashed, out = [torch.full((2,), 8.0).half()], [torch.full((2,), 0.5)], [torch.empty(2)]
    scaler.unscale_with_stashed(model, stashed, out, scale_override=override)
    expected = 8 / 8 + 0.5 if override is None else 8 * 2 / 4 + 0.5 * 2 / 1
    assert out[0].tolist() == [expected] * 2
    stashed[0][0] = math.inf  # in a sum that was checked before
    scaler.unscale_with_stashed(model, stashed, out)
    assert not scaler.update_scale()
    model[0][1] = math.inf
    scaler.unscale_with_stashed(model, stashed, out)
    assert scaler.update_scale()
    scaler.unscale_with_stashed([torch.ones(2).half()], stashed, out)
    assert not scaler.update_scale()  # for an overflow that was decided before


def test_has_overflow_that_is_written_decides() -> None:
    scaler = LossScaler("dynamic", init_scale=8.0)
    scaler._has_overflow = True
    assert scaler._has_overflow and scaler.update_scale() and scaler.loss_scale() == 4.0
    scaler._has_overflow = False
    assert not scaler.update_scale() and scaler.loss_scale() == 4.0
    fixed = LossScaler(8.0)
    fixed._has_overflow = True
    assert not fixed.update_scale()


def test_scale_seq_len_that_is_written_takes_effect() -> None:
    scaler = LossScaler("dynamic", init_scale=8.0)
    assert scaler._scale_seq_len == 2000
    scaler._unskipped = 1500
    scaler._loss_scale = 4.0
    scaler._scale_seq_len = 3
    assert (scaler.loss_scale(), scaler._scale_seq_len) == (4.0, 3)
    scaler._unskipped = 0
    assert [(scaler.update_scale(), scaler.loss_scale())[1] for _ in range(4)] == [4, 4, 8, 8]
    copied = pickle.loads(pickle.dumps(scaler))
    assert (copied._scale_seq_len, copied._unskipped, copied.loss_scale()) == (3, 1, 8.0)


def test_overflow_buf_of_a_script_decides_and_is_cleared() -> None:
    scaler = LossScaler("dynamic", init_scale=8.0)
    assert scaler._overflow_buf.tolist() == [0]
    buffer = torch.zeros(1, dtype=torch.int32)
    scaler._overflow_buf = buffer
    assert scaler._overflow_buf is buffer and not scaler.update_scale()
    grads = [torch.tensor([math.inf])]
    amp_C.multi_tensor_scale(65536, buffer, [grads, grads], 1.0)
    assert scaler.update_scale() and scaler._has_overflow and scaler.loss_scale() == 4.0
    assert buffer.tolist() == [1]
    scaler.scale(torch.ones(()))  # as scale_loss does
    assert buffer.tolist() == [0] and not scaler.update_scale()


# --- levels, lists and the rest of amp ---


@pytest.fixture
def restored_lists() -> Iterator[None]:
    every = [
        getattr(overrides, name)
        for overrides in (functional_overrides, tensor_overrides, torch_overrides)
        for name in ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS", "BANNED_FUNCS")
    ]
    before = [list(members) for members in every]
    yield
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()
    for members, old in zip(every, before, strict=True):
        members[:] = old


half = torch.ones(2, 3).half()


def test_lists_have_the_names_of_apexs() -> None:
    assert functional_overrides.MODULE is torch.nn.functional
    assert torch_overrides.MODULE is torch and tensor_overrides.MODULE is torch.Tensor
    assert {"linear", "conv2d"} <= set(functional_overrides.FP16_FUNCS)
    assert {"softmax", "cross_entropy", "interpolate"} <= set(functional_overrides.FP32_FUNCS)
    assert {"addmm", "bmm", "prelu"} <= set(torch_overrides.FP16_FUNCS)
    assert {"exp", "pow", "sum"} <= set(torch_overrides.FP32_FUNCS)
    assert {"__pow__", "cpu"} <= set(tensor_overrides.FP32_FUNCS)
    assert {"add", "mul", "eq"} <= set(torch_overrides.CASTS)
    assert torch_overrides.SEQUENCE_CASTS == ["cat", "stack"]
    assert [name for name, _ in functional_overrides.BANNED_FUNCS] == ["binary_cross_entropy"]


def test_function_removed_from_the_lists_follows_its_inputs(restored_lists: None) -> None:
    functional_overrides.FP32_FUNCS.remove("softmax")
    functional_overrides.FP16_FUNCS.remove("linear")
    tensor_overrides.FP32_FUNCS.remove("exp")
    amp.init()
    assert torch.nn.functional.softmax(half, 1).dtype == torch.float16
    assert torch.nn.functional.linear(half.float(), half.float()).dtype == torch.float32
    assert half.exp().dtype == torch.float16 and torch.exp(half).dtype == torch.float32
    with amp.disable_casts():
        assert half.exp().dtype == torch.float16
    assert half.clone().exp_().dtype == torch.float16  # no longer refused
    assert torch.nn.functional.log_softmax(half, 1).dtype == torch.float32
    _amp_state.handle._deactivate()
    assert torch.exp(half).dtype == torch.float16


def test_banned_function_removed_from_its_list_runs(restored_lists: None) -> None:
    (banned,) = functional_overrides.BANNED_FUNCS
    amp.init()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy"):
        torch.nn.functional.binary_cross_entropy(half / 2, half)
    functional_overrides.BANNED_FUNCS.remove(banned)
    functional_overrides.FP32_FUNCS.append("binary_cross_entropy")
    amp.init()
    loss = torch.nn.functional.binary_cross_entropy(half / 2, half)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_optimizer_whose_state_was_cleared_by_a_plain_dict_trains(level: str, kind: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.state = {}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(4, 3)).float().mean() / 8, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    if kind is torch.optim.Adam:
        assert [float(entry["step"]) for entry in optimizer.state.values()] == [2.0, 2.0]
