# SPDX-License-Identifier: BSD-3-Clause
"""Attributes and methods of the module, read through the wrapper."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from ddp_models import build, data
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_gradients,
    check_step,
    gradients,
    raises,
    to_reference,
    widen,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


class Net(nn.Module):
    """Has names that the wrapper also has: `dim`, `prof`, and `no_sync`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.prof = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("offset", torch.tensor(0.5))
        self.dim = 17
        self.words = ["a"]
        self.nothing: Any = None
        self._head = 5
        self.config = {"width": 4}

    def forward(self, x: Tensor) -> Tensor:
        return self.generate(x)

    def generate(self, x: Tensor, *, times: float = 1.0) -> Tensor:
        return self.prof(self.norm(self.fc(x))) * self.scale * times + self.offset

    def no_sync(self) -> str:
        return "of the module"

    @property
    def width(self) -> int:
        return self.fc.in_features

    @property
    def broken(self) -> int:
        return self.nothing.width

    @property
    def broken_in_a_part(self) -> int:
        return self.fc.wdth


class Sub(DistributedDataParallel):
    """A subclass as in libraries: with its own attributes, some under names that the module has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.config = {"width": 5}
        self.generate = module.generate
        self.fc = module.fc

    @property
    def broken_here(self) -> int:
        return self.process_group.no_such_thing


def _reads(rank: int, world: int) -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    check(ddp.fc is net.fc and ddp.fc.weight is net.fc.weight, "a layer")
    check(ddp.scale is net.scale and ddp.offset is net.offset, "a parameter and a buffer")
    check(ddp.words is net.words and ddp.nothing is None and ddp.config is net.config, "values")
    check_equal(ddp.width, 4, "a property")
    x = data(rank)
    check_equal(ddp.generate(x, times=2.0), net.generate(x, times=2.0), "a method")
    # Attributes of the wrapper take precedence.
    check_equal((ddp.dim, ddp.prof, net.dim), (0, False, 17), "options of the wrapper")
    check(isinstance(ddp.no_sync(), contextlib.AbstractContextManager), "a method of the wrapper")
    ddp.words.append("b")
    check_equal(net.words, ["a", "b"], "the same list")


def test_attribute_that_wrapper_lacks_is_the_modules(ranks: RankPool) -> None:
    ranks.run(2, _reads)


def _missing(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(Net())
    both = "'DistributedDataParallel' object has no attribute 'fx', and neither has the 'Net' that"
    with raises(AttributeError, both):
        ddp.fx  # noqa: B018
    check(not hasattr(ddp, "fx") and getattr(ddp, "fx", 3) == 3, "hasattr() and a default")
    # Marks of libraries stay on the module that has them.
    net = ddp.module
    net._hf_hook = net._orig_mod = object()
    for name in ("_head", "_hf_hook", "_orig_mod", "__len__", "_ddp_params_and_buffers_to_ignore"):
        check(not hasattr(ddp, name), name)
        with raises(AttributeError, f"object has no attribute '{name}'"):
            getattr(ddp, name)
    # A failing property is not a missing attribute.
    with raises(AttributeError, "'NoneType' object has no attribute 'width'"):
        ddp.broken  # noqa: B018
    with raises(AttributeError, "'Linear' object has no attribute 'wdth'"):
        ddp.broken_in_a_part  # noqa: B018
    with raises(AttributeError, "no attribute 'no_such_thing'"):
        Sub(Net()).broken_here  # noqa: B018

    class Asked(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            if name == "answer":
                return 42
            return super().__getattr__(name)

    ddp = DistributedDataParallel(Asked(4, 4))
    check_equal(ddp.answer, 42, "what a module's own __getattr__ returns")
    check(not hasattr(ddp, "question"), "what it does not know")


def test_missing_attribute_names_both_classes_and_keeps_errors_of_properties(
    ranks: RankPool,
) -> None:
    ranks.run(1, _missing)


def _without_module(kind: Any) -> Any:
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    return made


def _before_there_is_a_module(rank: int, world: int) -> None:
    for kind in (DistributedDataParallel, Sub):
        for empty in (kind.__new__(kind), _without_module(kind)):
            for name in ("module", "fc", "_engine", "__deepcopy__"):
                check(not hasattr(empty, name), f"{name} of an object without a module")
    with raises(TypeError, "wraps a torch.nn.Module"):
        DistributedDataParallel(3)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(Net())
    for twin in (copy.copy(ddp), copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        check(twin.fc is twin.module.fc, "a layer of a copy")
        check_equal(twin.words, ["a"], "a value of a copy")
        check(not hasattr(twin, "fx"), "what a copy has not")


def test_wrapper_without_a_module_yet_has_no_attribute_and_copies(ranks: RankPool) -> None:
    ranks.run(1, _before_there_is_a_module)


def _duck_typing(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(Net()))
    names = ("module", "no_sync", "require_backward_grad_sync", "register_comm_hook", "join")
    check(all(hasattr(ddp, name) for name in names), "what libraries look for")
    unwrapped: Any = ddp
    while hasattr(unwrapped, "module"):
        unwrapped = unwrapped.module
    check(unwrapped is ddp.module, "unwrapping by hasattr()")
    check(not hasattr(ddp, "device_mesh"), "an attribute that was not given")
    # parametrize checks each module itself.
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    ddp = DistributedDataParallel(layer)
    check(parametrize.is_parametrized(layer), "the layer")
    check(not parametrize.is_parametrized(ddp), "the wrapper")
    check(parametrize.type_before_parametrizations(ddp) is DistributedDataParallel, "its class")
    # A wrapper inside a wrapper, and a compiled module inside.
    outer = DistributedDataParallel(DistributedDataParallel(Net()))
    check(outer.fc is outer.module.module.fc, "through two wrappers")
    compiled = DistributedDataParallel(torch.compile(Net(), backend="eager"))
    check(compiled.fc is compiled.module._orig_mod.fc, "through a compiled module")
    scripted = DistributedDataParallel(torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    check(not hasattr(scripted, "fx"), "of a scripted module")


def test_libraries_that_ask_by_hasattr_see_the_wrapper(ranks: RankPool) -> None:
    ranks.run(1, _duck_typing)


def _methods_train(rank: int, world: int, first: bool) -> None:
    net = build(Net).eval()  # batch norm is then that of the reference
    ddp = DistributedDataParallel(net, message_size=7)
    if first:
        check_step(ddp, lambda m, r: m(data(r)).square().sum(), "a forward before")
    for step in range(3):
        reference = to_reference(net)
        for r in range(world):
            (reference.generate(*widen([data(r, step)])).square().sum() / world).backward()
        ddp.zero_grad()
        ddp.generate(data(rank, step)).square().sum().backward()
        check_gradients(net, gradients(reference), f"step {step}", 1e-4)
    check(ddp.statistics()["launched_in_backward"] > 0, "no bucket was launched in backward")


@pytest.mark.parametrize("first", [True, False], ids=["after_forward", "without"])
def test_training_through_a_method_of_the_module_averages(ranks: RankPool, first: bool) -> None:
    ranks.run(2, _methods_train, first)


def _sets(rank: int, world: int) -> None:
    net = Net()
    ddp = DistributedDataParallel(net)
    words = "'{}' is an attribute of the 'Net' that this DistributedDataParallel wraps"
    for name, value in {
        "fc": nn.Identity(),
        "scale": nn.Parameter(torch.tensor(1.0)),
        "offset": torch.tensor(1.0),
    }.items():
        before = getattr(net, name)
        with raises(AttributeError, words.format(name), f"assign to .module.{name}, on every"):
            setattr(ddp, name, value)
        check(getattr(ddp, name) is before, f"{name} has changed")
    check_equal([n for n, _ in ddp.named_children()], ["module"], "children of the wrapper")
    # Hazard: a second reference in the wrapper would have separate keys and become stale.
    ddp.fc = ddp.fc.to(torch.float64)
    ddp.offset += 1
    with torch.no_grad():
        ddp.scale *= 2
    check_equal((net.offset.item(), net.scale.item()), (1.5, 4.0), "what was changed in place")
    ddp.double()
    check(ddp.offset is net.offset and ddp.offset.dtype == torch.float64, "not stale")
    check(all(key.startswith("module.") for key in ddp.state_dict()), "keys of the wrapper")
    ddp.module.fc = nn.Linear(4, 4)
    check(ddp.fc is net.fc, "the new layer")
    # Other values are set on the wrapper, and so are names that only the wrapper has.
    ddp.config = {"width": 6}
    check_equal((ddp.config, net.config), ({"width": 6}, {"width": 4}), "a value")
    ddp.teacher = nn.Linear(1, 1)
    ddp.teacher = nn.Linear(2, 2)
    ddp.module = other = Net()
    check(ddp.fc is other.fc, "of another module")
    # A wrapper subclass that stores the module's attributes, as scripts did before.
    sub = Sub(Net())
    check_equal(sub.config, {"width": 5}, "a value of a subclass")
    check(sub.fc is sub.module.fc and sub.generate == sub.module.generate, "the module's own")


def test_layer_assigned_to_a_name_of_the_module_is_refused(ranks: RankPool) -> None:
    ranks.run(1, _sets)
