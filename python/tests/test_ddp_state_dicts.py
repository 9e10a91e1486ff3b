# SPDX-License-Identifier: BSD-3-Clause
"""State dicts of the wrapper: the keys that it writes and accepts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ddp_models import build, data
from ddp_support import RankPool, check, check_equal, check_same_on_all_ranks, raises
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.fc.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.norm(self.fc(x)))


class Holder(nn.Module):
    """Its own keys begin with ``module.``, as those of torch's AveragedModel do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def _check_loaded(ddp: nn.Module, source: nn.Module, what: str) -> None:
    loaded = ddp.module.state_dict()
    for name, value in source.state_dict().items():
        check_equal(loaded[name], value, f"{name}, {what}")


def _loads(rank: int, world: int, kind: type[nn.Module]) -> None:
    source, original = build(kind, seed=3), build(kind, seed=4)
    with_prefix = DistributedDataParallel(source).state_dict()
    without = source.state_dict()
    stripped = copy.copy(with_prefix)
    consume_prefix_in_state_dict_if_present(stripped, "module.")
    check_equal(list(stripped), list(without), "keys that torch strips")
    loads: list[tuple[str, Any, dict[str, Any]]] = [
        ("with prefix", with_prefix, {}),
        ("without", without, {}),
        ("stripped", stripped, {}),
        ("plain dict", dict(without), {}),
        ("assign", copy.deepcopy(without), {"assign": True}),
        ("assign, prefix", copy.deepcopy(with_prefix), {"assign": True}),
        ("not strict", without, {"strict": False}),
    ]
    for what, state, options in loads:
        ddp = DistributedDataParallel(copy.deepcopy(original))
        keys = list(state)
        result = ddp.load_state_dict(state, **options)
        check_equal((result.missing_keys, result.unexpected_keys), ([], []), what)
        check_equal(list(state), keys, f"the caller's keys, {what}")
        _check_loaded(ddp, source, what)
        ddp(data(rank)).square().sum().backward()
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"gradients, {what}")
    check_equal(list(ddp.state_dict()), ["module." + name for name in without], "keys")
    check_equal(list(ddp.module.state_dict()), list(without), "keys of the module")


@pytest.mark.parametrize("kind", [Net, Holder])
def test_state_dict_loads_with_and_without_prefix(ranks: RankPool, kind: type[nn.Module]) -> None:
    ranks.run(2, _loads, kind)


def _versions(rank: int, world: int) -> None:
    """Modules convert old state by the version in the metadata."""

    class Versioned(nn.Linear):
        _version = 2
        seen: Any = None

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local: Any, *a: Any) -> None:
            self.seen = local.get("version")
            if f"{prefix}old" in state_dict:
                state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old")
            super()._load_from_state_dict(state_dict, prefix, local, *a)

    source = nn.Sequential(Versioned(3, 3))
    ddp = DistributedDataParallel(nn.Sequential(Versioned(3, 3)))
    for state in (source.state_dict(), DistributedDataParallel(source).state_dict()):
        ddp.module[0].seen = None
        ddp.load_state_dict(state)
        check_equal(ddp.module[0].seen, 2, "version")
    ddp.load_state_dict(dict(source.state_dict()))
    check_equal(ddp.module[0].seen, None, "version of a plain dict")
    # Keys that the module renames while it loads.
    renamed = {"0.old": torch.ones(3, 3), "0.bias": torch.ones(3)}
    ddp.load_state_dict(renamed)
    check_equal(ddp.module[0].weight.data, torch.ones(3, 3), "a renamed key")
    ddp = DistributedDataParallel(Versioned(3, 3, bias=False))
    ddp.load_state_dict({"old": torch.ones(3, 3)})
    check_equal(ddp.module.weight.data, torch.ones(3, 3), "only a renamed key")


def test_versions_and_renamed_keys_are_kept_without_prefix(ranks: RankPool) -> None:
    ranks.run(1, _versions)


def _refused(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(Net, seed=4))
    before = copy.deepcopy(ddp.state_dict())
    mixed = {**ddp.state_dict(), **build(Net, seed=5).state_dict()}
    for strict in (True, False):
        with raises(
            RuntimeError,
            "mixes keys with and without 'module.' in front: 'module.fc.weight' and 'fc.weight'",
            "Either all keys or none",
        ):
            ddp.load_state_dict(mixed, strict=strict)
    for name, value in ddp.state_dict().items():
        check_equal(value, before[name], f"{name} after the error")
    # As in torch: an unknown key, a missing key, another shape.
    state = build(Net, seed=5).state_dict()
    with raises(RuntimeError, 'Unexpected key(s) in state_dict: "module.epoch"'):
        ddp.load_state_dict({**state, "epoch": torch.tensor(1)})
    with raises(RuntimeError, 'Unexpected key(s) in state_dict: "epoch"'):
        ddp.load_state_dict({**before, "epoch": torch.tensor(1)})
    result = ddp.load_state_dict({**before, "epoch": torch.tensor(1)}, strict=False)
    check_equal(result.unexpected_keys, ["epoch"], "unexpected")
    result = ddp.load_state_dict({"fc.weight": state["fc.weight"]}, strict=False)
    check("module.fc.bias" in result.missing_keys, "missing")
    check_equal(ddp.module.fc.weight.data, state["fc.weight"], "the key that is there")
    with raises(RuntimeError, 'Missing key(s) in state_dict: "module.fc.weight"'):
        ddp.load_state_dict({})
    with raises(RuntimeError, "size mismatch for module.fc.bias"):
        ddp.load_state_dict({**state, "fc.bias": torch.zeros(5)})
    with raises(TypeError, "dict-like"):
        ddp.load_state_dict([1])


def test_state_dict_with_mixed_or_wrong_keys_raises(ranks: RankPool) -> None:
    ranks.run(1, _refused)


class Ambiguous(nn.Module):
    """Its key ``module.weight`` is also the wrapper's key for its ``weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.module = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) * self.weight


def _ambiguous(rank: int, world: int) -> None:
    source = build(Ambiguous, seed=3)
    for name, given in (
        ("without", source.state_dict()),
        ("with prefix", DistributedDataParallel(source).state_dict()),
    ):
        ddp = DistributedDataParallel(build(Ambiguous, seed=4))
        ddp.load_state_dict(given)
        _check_loaded(ddp, source, name)


def test_keys_that_fit_both_readings_are_taken_as_all_of_them_fit(ranks: RankPool) -> None:
    ranks.run(1, _ambiguous)


def _checkpoint_functions(rank: int, world: int) -> None:
    """torch.distributed.checkpoint strips ``module.`` only for torch's own class."""
    source = DistributedDataParallel(build(Net, seed=3))
    state = dcp.get_model_state_dict(source)
    plain = dcp.get_model_state_dict(source.module)
    check_equal(list(state), ["module." + name for name in plain], "keys")
    for name, given in (("with prefix", state), ("without", plain)):
        ddp = DistributedDataParallel(build(Net, seed=4))
        dcp.set_model_state_dict(ddp, dict(given))
        _check_loaded(ddp, source.module, name)
    full = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    ddp = DistributedDataParallel(build(Net, seed=4))
    with raises(RuntimeError, "mixes keys with and without 'module.'"):
        dcp.set_model_state_dict(ddp, dict(plain), options=full)
    dcp.set_model_state_dict(ddp, dict(state), options=full)
    _check_loaded(ddp, source.module, "the full state dict")
    ddp = DistributedDataParallel(build(Net, seed=4))
    dcp.set_model_state_dict(ddp.module, dict(plain), options=full)
    _check_loaded(ddp, source.module, "the full state dict of the module")


def test_functions_of_torch_distributed_checkpoint(ranks: RankPool) -> None:
    ranks.run(2, _checkpoint_functions)
