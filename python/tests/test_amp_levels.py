# SPDX-License-Identifier: BSD-3-Clause
"""amp.initialize: levels and overrides, argument types, errors, and changes to the model."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import copy
import dataclasses
import io
import types
from typing import Any

import numpy as np
import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import Tensor, nn

from apex import amp
from apex.amp import _amp_state
from apex.fp16_utils import FP16_Optimizer
from apex.parallel import DistributedDataParallel

F32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
LEVELS = {
    "O0": (F32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (HALF, False, True, True, "dynamic"),
    "O3": (HALF, False, False, False, 1.0),
    "O1-bf16": (None, True, None, None, 1.0),
    "O2-bf16": (BF16, False, True, True, 1.0),
    "O3-bf16": (BF16, False, False, False, 1.0),
}
NAMES = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sgd(model: nn.Module, **options: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


@pytest.mark.parametrize("level", LEVELS)
def test_initialize_level_sets_the_property_table(level: str) -> None:
    amp.initialize(net(), opt_level=level, verbosity=0)
    properties = _amp_state.opt_properties
    assert tuple(getattr(properties, name) for name in NAMES) == LEVELS[level]
    assert tuple(properties.options[name] for name in NAMES) == LEVELS[level]
    assert properties.options["opt_level"] == level and properties.enabled


@pytest.mark.parametrize(
    "options, name, expected",
    [
        ({"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
        ({"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
        ({"loss_scale": "128.0"}, "loss_scale", 128.0),
        ({"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
        ({"loss_scale": 4}, "loss_scale", 4.0),
        ({"master_weights": False}, "master_weights", False),
        ({"cast_model_type": BF16}, "cast_model_type", BF16),
        ({"cast_model_type": False}, "cast_model_type", False),
    ],
)
def test_initialize_override_wins(options: dict, name: str, expected: object) -> None:
    amp.initialize(net(), opt_level="O2", verbosity=0, **options)
    assert getattr(_amp_state.opt_properties, name) == expected


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"opt_level": "01"}, RuntimeError, "letter O"),
        ({"opt_level": "O4"}, RuntimeError, "O1-bf16"),
        ({"opt_level": "o1"}, RuntimeError, "choose one of"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32"),
        ({"opt_level": "O1", "master_weights": True}, RuntimeError, "master_weights"),
        ({"opt_level": "O1", "cast_model_type": HALF}, RuntimeError, "cast_model_type"),
        ({"opt_level": "O2", "patch_torch_functions": True}, RuntimeError, "belongs to O1"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, AssertionError, "'True' or 'False'"),
        ({"opt_level": "O2", "loss_scale": "huge"}, ValueError, "huge"),
        ({"opt_level": "O0", "loss_scale": -1.0}, ValueError, "positive"),
        ({"opt_level": "O2", "loss_scale": [1.0]}, ValueError, r"loss_scale is \[1.0\]"),
        ({"opt_level": "O2", "max_loss_scale": 0.0}, ValueError, "max_loss_scale is 0.0"),
        ({"opt_level": "O2", "max_loss_scale": None}, ValueError, "max_loss_scale is None"),
        ({"opt_level": "O2", "num_losses": 0}, ValueError, "num_losses is 0"),
        ({"opt_level": "O2", "num_losses": "3"}, ValueError, "num_losses is '3'"),
        ({"opt_level": "O2", "cast_model_type": "half"}, TypeError, "cast_model_type is 'half'"),
        ({"opt_level": "O2", "cast_model_type": torch.int32}, TypeError, "cast_model_type is"),
        ({"opt_level": "O1", "cast_model_outputs": "half"}, TypeError, "cast_model_outputs is"),
    ],
)
def test_initialize_contradiction_raises(options: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        amp.initialize(net(), verbosity=0, **options)


def test_initialize_list_with_something_else_in_it_raises() -> None:
    model = net()
    with pytest.raises(TypeError, match="takes a torch.nn.Module or a list of them, not a list wi"):
        amp.initialize([model, 3], verbosity=0)
    with pytest.raises(TypeError, match="takes a torch optimizer .* not a list with NoneType"):
        amp.initialize([model], [sgd(model), None], verbosity=0)


@pytest.mark.parametrize("value", [None, False, F32])
def test_initialize_o1_accepts_harmless_cast_model_type(value: object) -> None:
    model = amp.initialize(net(), opt_level="O1", cast_model_type=value, verbosity=0)
    assert model[0].weight.dtype == F32


def test_initialize_hard_override_turns_error_into_warning() -> None:
    _amp_state.hard_override = True
    with pytest.warns(UserWarning, match="belongs to O1"):
        amp.initialize(net(), opt_level="O0", patch_torch_functions=True, verbosity=0)


def test_initialize_returns_the_shape_it_was_given() -> None:
    one, two = net(), net()
    assert amp.initialize(one, opt_level="O0", verbosity=0) is one
    assert amp.initialize([one, two], opt_level="O0", verbosity=0) == [one, two]
    first, second = sgd(one), sgd(two)
    assert amp.initialize(one, first, opt_level="O0", verbosity=0) == (one, first)
    models, optimizer = amp.initialize([one, two], second, opt_level="O0", verbosity=0)
    assert models == [one, two] and optimizer is second
    model, optimizers = amp.initialize(one, [sgd(one), sgd(two)], opt_level="O0", verbosity=0)
    assert model is one and len(optimizers) == 2
    for bad in ((one, two), "model", 1):
        with pytest.raises(TypeError, match="list"):
            amp.initialize(bad, verbosity=0)
    with pytest.raises(TypeError, match="list"):
        amp.initialize(one, (sgd(one),), verbosity=0)


def test_initialize_disabled_returns_arguments_and_scale_loss_yields_the_loss() -> None:
    model, optimizer = net(), sgd(net())
    pair = (model, model)
    assert amp.initialize(pair, enabled=False) is pair
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    loss = torch.ones((), dtype=HALF)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


def test_scale_loss_before_initialize_raises() -> None:
    with (
        pytest.raises(RuntimeError, match="before amp.initialize"),
        amp.scale_loss(torch.ones(()), sgd(net())),
    ):
        pass


def test_scale_loss_unknown_loss_id_raises() -> None:
    model, optimizer = amp.initialize(net(), sgd(net()), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="num_losses"):  # noqa: SIM117
        with amp.scale_loss(torch.ones(()), optimizer, loss_id=1):
            pass


def test_initialize_refuses_what_is_low_precision_or_wrapped_already() -> None:
    with pytest.raises(RuntimeError, match="parameter 0.weight"):
        amp.initialize(net().half(), verbosity=0)
    buffered = net()
    buffered.register_buffer("mean", torch.zeros(2, dtype=BF16))
    with pytest.raises(RuntimeError, match="buffer mean"):
        amp.initialize(buffered, verbosity=0)
    with pytest.raises(RuntimeError, match="DataParallel"):
        amp.initialize(nn.DataParallel(net()), verbosity=0)
    model = net()
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        amp.initialize(model, FP16_Optimizer(sgd(model)), opt_level="O0", verbosity=0)
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="twice"):
        amp.initialize(model, [optimizer, optimizer], opt_level="O0", verbosity=0)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    with pytest.raises(RuntimeError, match="twice"):
        amp.initialize(model, optimizer, opt_level="O0", verbosity=0)


def test_initialize_allow_incoming_model_not_fp32_accepts_half() -> None:
    _amp_state.allow_incoming_model_not_fp32 = True
    model = amp.initialize(net().half(), opt_level="O2", verbosity=0)
    assert model[0].weight.dtype == HALF


def test_initialize_prints_options_unless_silent(capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(net(), opt_level="O2", loss_scale=128.0, verbosity=0)
    assert capsys.readouterr().out == ""
    amp.initialize(net(), opt_level="O2", loss_scale=128.0)
    printed = capsys.readouterr().out
    assert "optimization level O2" in printed
    assert "loss_scale             : dynamic" in printed
    assert "loss_scale             : 128.0" in printed


class Mixed(nn.Module):
    """A model with everything that a cast must distinguish."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.affine = nn.BatchNorm1d(4)
        self.plain = nn.BatchNorm1d(4, affine=False)
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("scale", torch.ones(2))
        self.gain = nn.Parameter(torch.ones(2, dtype=torch.complex64) * (1 + 1j))
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.full((2,), 0.1)))
        self.seen: object = None

    def forward(self, *inputs: object, **named: object) -> object:
        self.seen = (inputs, named)
        return inputs[0] if inputs else None


@pytest.mark.parametrize(
    "level, keep, low, norm",
    [
        ("O0", None, F32, F32),
        ("O1", None, F32, F32),
        ("O2", None, HALF, F32),
        ("O2", False, HALF, HALF),
        ("O3", None, HALF, HALF),
        ("O3", True, HALF, F32),
        ("O2-bf16", None, BF16, F32),
        ("O3-bf16", None, BF16, BF16),
    ],
)
def test_initialize_casts_the_model(
    level: str, keep: bool | None, low: torch.dtype, norm: torch.dtype
) -> None:
    model = amp.initialize(Mixed(), opt_level=level, keep_batchnorm_fp32=keep, verbosity=0)
    assert model.linear.weight.dtype == model.linear.bias.dtype == low
    assert model.scale.dtype == low and model.plain.running_mean.dtype == low
    assert model.affine.weight.dtype == model.affine.running_var.dtype == norm
    assert model.count.dtype == torch.int64
    assert model.plain.num_batches_tracked.dtype == torch.int64
    for name in ("turn", "gain"):  # in float16, a part would be lost
        assert torch.equal(getattr(model, name), getattr(Mixed(), name)), name


Pair = collections.namedtuple("Pair", "x y")
Frozen = dataclasses.make_dataclass("Frozen", ["x", "y"], frozen=True)


class Batch:
    """A user-defined container with a ``to`` method."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.x.to(dtype))


@pytest.mark.parametrize("level, low", [("O0", F32), ("O2", HALF), ("O3-bf16", BF16)])
def test_cast_model_casts_nested_inputs_and_leaves_the_rest(level: str, low: torch.dtype) -> None:
    model = amp.initialize(Mixed(), opt_level=level, verbosity=0)
    x, index, array = torch.ones(2), torch.arange(2), np.ones(2)
    model(
        x,
        [x, (index, {"a": x.double()})],
        Pair(x, index),
        collections.OrderedDict(k=x),
        Batch(x),
        array,
        key=x,
        sample=Frozen(x, 3),
        text="text",
        number=1.5,
        nothing=None,
    )
    inputs, named = model.seen
    assert inputs[0].dtype == low
    assert inputs[1][0].dtype == low and inputs[1][1][0] is index
    assert inputs[1][1][1]["a"].dtype == low
    assert isinstance(inputs[2], Pair) and inputs[2].x.dtype == low and inputs[2].y is index
    assert isinstance(inputs[3], collections.OrderedDict) and inputs[3]["k"].dtype == low
    assert inputs[4].x.dtype == low and inputs[5] is array and inputs[5].dtype == np.float64
    assert named["key"].dtype == named["sample"].x.dtype == low and named["sample"].y == 3
    assert (named["text"], named["number"], named["nothing"]) == ("text", 1.5, None)


@pytest.mark.parametrize(
    "level, outputs, expected",
    [
        ("O0", None, F32),
        ("O0", HALF, HALF),
        ("O1", None, HALF),
        ("O1", F32, F32),
        ("O2", None, F32),
        ("O2", HALF, HALF),
        ("O3", None, F32),
        ("O2-bf16", None, F32),
    ],
)
def test_cast_model_outputs(level: str, outputs: torch.dtype | None, expected: object) -> None:
    model = amp.initialize(net(), opt_level=level, cast_model_outputs=outputs, verbosity=0)
    assert model(torch.rand(3, 4)).dtype == expected
    assert model.forward(torch.rand(3, 4)).dtype == expected


def test_cast_model_false_leaves_model_and_inputs_alone() -> None:
    model = amp.initialize(Mixed(), opt_level="O2", cast_model_type=False, verbosity=0)
    assert model.linear.weight.dtype == F32 and "forward" not in vars(model)


@pytest.mark.parametrize("level", ["O2", "O3", "O2-bf16"])
def test_state_dict_of_cast_model_and_submodules_is_float32(level: str) -> None:
    class WithExtra(Mixed):
        def get_extra_state(self) -> dict:
            return {"note": "not a tensor"}

        def set_extra_state(self, state: dict) -> None:
            pass

    model = amp.initialize(WithExtra(), opt_level=level, verbosity=0)
    for state in (model.state_dict(), model.linear.state_dict()):
        tensors = [value for value in state.values() if torch.is_tensor(value)]
        assert {tensor.dtype for tensor in tensors} <= {F32, torch.int64, torch.complex64}
    assert model.linear.weight.dtype in (HALF, BF16)
    model.load_state_dict(model.state_dict())
    assert model.linear.weight.dtype in (HALF, BF16)
    assert model.state_dict(keep_vars=True)["linear.weight"] is model.linear.weight


def test_cast_model_copied_or_pickled_runs_its_own_parameters() -> None:
    model = amp.initialize(net().eval(), opt_level="O2", verbosity=0)
    x = torch.rand(3, 4)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x), expected)
        with torch.no_grad():
            twin[2].bias.add_(1)
        assert not torch.equal(twin(x), expected) and torch.equal(model(x), expected)


def test_initialize_existing_optimizer_state_follows_the_parameters() -> None:
    for level, expected in (("O2", F32), ("O3", HALF)):
        model = net()
        optimizer = sgd(model, momentum=0.9)
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        before = optimizer.state[model[0].weight]["momentum_buffer"].clone()
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        optimizer.zero_grad()
        buffer = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
        assert buffer.dtype == expected
        assert torch.equal(buffer, before.to(expected))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(
    "fault",
    [
        {"loss_scale": -1.0},
        {"loss_scale": "dynamic", "min_loss_scale": 2.0**30},
        {"loss_scale": "dynamic", "min_loss_scale": -1.0},
        {"num_losses": "two"},
        {"optimizers": "twice"},
        {"models": "scripted"},
        {"models": "wrapped"},
    ],
    ids=str,
)
def test_initialize_that_fails_changes_nothing(level: str, fault: dict) -> None:
    model, options = net(), dict(fault)
    models: list[nn.Module] = [model]
    optimizers: list[torch.optim.Optimizer] = [sgd(model)]
    if options.pop("optimizers", None):
        optimizers *= 2
    kind = options.pop("models", None)
    if kind == "scripted":
        models.append(torch.jit.script(net()))
        if level in ("O0", "O1"):
            return  # works
    elif kind == "wrapped":
        wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
        nn.Module.__init__(wrapper)
        models.append(wrapper)
    before = copy.deepcopy(model.state_dict())
    methods = vars(optimizers[0]).copy()
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        amp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
    assert "forward" not in vars(model) and vars(optimizers[0]).keys() == methods.keys()
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == F32
    model, optimizer = amp.initialize(model, optimizers[0], opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.rand(3, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()


def test_o1_that_fails_leaves_no_function_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="immutable type 'str'"):
        amp.register_float_function(str, "upper")
    module = types.SimpleNamespace(f=torch.add)
    amp.register_half_function(module, "f")
    model = net()
    optimizer = sgd(model)
    with monkeypatch.context() as changed:
        changed.setattr(amp.lists.torch_overrides, "FP16_FUNCS", ["mm", 42])
        with pytest.raises(TypeError):
            amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert module.f is torch.add and not hasattr(optimizer, "_amp_stash")
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert module.f(torch.ones(2), 1.0).dtype == HALF


def test_initialize_disabled_ends_the_casts_of_an_earlier_one() -> None:
    amp.initialize(net(), opt_level="O1", verbosity=0)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == HALF
    amp.initialize(net(), enabled=False)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == F32
    assert torch.get_autocast_dtype("cpu") == BF16, "torch's default"


OTHERS: list[dict[str, Any]] = [
    {"enabled": False},
    {"opt_level": "O1", "loss_scale": 4.0},
    {"opt_level": "O3"},
]


def _pair(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _step(
    model: nn.Module, optimizer: Any, step: int, scaled: bool = True, inf: bool = False
) -> float:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    with contextlib.nullcontext() if scaled else amp.disable_casts():
        loss = (model(x).float() - 1).square().mean()
    context: Any = amp.scale_loss(loss, optimizer) if scaled else contextlib.nullcontext(loss)
    with context as scaled_loss:
        (scaled_loss * (float("inf") if inf else 1.0)).backward()
    optimizer.step()
    return loss.item()


def _masters(optimizer: Any) -> list[Tensor]:
    return [m.detach().float().clone() for m in amp.master_params(optimizer)]


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_first_model_trains_as_if_there_were_no_second(
    level: str, other: dict[str, Any], with_optimizer: bool
) -> None:
    def first(second: bool) -> tuple[list[Tensor], float, Any]:
        model, optimizer = amp.initialize(
            *_pair(0), opt_level=level, loss_scale="dynamic", verbosity=0
        )
        scaler = _amp_state.loss_scalers[0]
        for step in range(6):
            if second and step == 3:
                pair = _pair(1) if with_optimizer else _pair(1)[:1]
                amp.initialize(*pair, verbosity=0, **other)
            _step(model, optimizer, step, inf=step == 4)
        return _masters(optimizer), scaler.loss_scale(), amp.state_dict()

    want, scale, state = first(second=False)
    mine, my_scale, my_state = first(second=True)
    assert my_scale == scale < 2.0**16
    for a, b in zip(mine, want, strict=True):
        if level == "O1":  # casts belong to the thread, so the last initialize determines them
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(a, b)
    if not with_optimizer:  # an inference model: the checkpoint is the first model's
        assert my_state == state


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_second_model_trains_at_its_own_level(other: dict[str, Any]) -> None:
    reference = _pair(1)
    amp.initialize(*_pair(0), opt_level="O2", verbosity=0)
    model, optimizer = amp.initialize(*_pair(1), verbosity=0, **other)
    losses = [_step(model, optimizer, step) for step in range(4)]
    want = [_step(*reference, step, scaled=False) for step in range(4)]
    assert losses == pytest.approx(want, rel=3e-2)
    with torch.no_grad():
        for a, b in zip(_masters(optimizer), reference[0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=3e-2, atol=1e-2)
