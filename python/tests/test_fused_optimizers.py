# SPDX-License-Identifier: BSD-3-Clause
"""FusedLAMB, FusedNovoGrad, FusedAdagrad, and FusedAdam's own options, compared with their
papers."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import fused_optimizer_references as references
import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import nn

from apex import optimizers

NEW = ["FusedLAMB", "FusedNovoGrad", "FusedAdagrad"]
REFERENCES = {
    "FusedLAMB": references.Lamb,
    "FusedNovoGrad": references.NovoGrad,
    "FusedAdam": references.Adam,
    "FusedAdagrad": references.Adagrad,
}
#: Odd sizes, a scalar, an empty tensor, and one with all zeros.
SHAPES = [(7, 3), (5,), (), (0, 4), (6,)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make_params(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    values[-1].zero_()
    return [nn.Parameter(value.to(dtype)) for value in values]


def set_grads(
    params: Iterable[torch.Tensor], step: int, missing: Iterable[int] = (), size: float = 1.0
) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for index, param in enumerate(params):
        grad = size * torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.grad = None if index in missing else grad.to(param.dtype)


def run(
    name: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    missing: Callable[[int], Iterable[int]] = lambda step: (),
    size: float = 1.0,
    steps: int = 5,
) -> torch.optim.Optimizer:
    """Steps of the optimizer and of its reference on the same gradients agree."""
    params = make_params(dtype)
    optimizer = getattr(optimizers, name)(params, **options)
    reference = REFERENCES[name](**options)
    expected = [p.detach().double().numpy().copy() for p in params]
    for step in range(steps):
        set_grads(params, step, missing(step), size)
        kept = [None if p.grad is None else p.grad.clone() for p in params]
        optimizer.step()
        for param, grad in zip(params, kept, strict=True):
            assert param.grad is None if grad is None else torch.equal(param.grad, grad)
        arrays = [None if g is None else g.double().numpy() for g in kept]
        reference.step(expected, arrays)
    # Squares of small gradients vanish in float16.
    kept = {value.dtype for entry in optimizer.state.values() for value in entry.values()}
    assert kept <= {torch.float32, torch.float64}
    for param, want in zip(params, expected, strict=True):
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(param.double(), torch.from_numpy(want), rtol=limit, atol=limit)
    return optimizer


LAMB_OPTIONS = [
    {},
    {"bias_correction": False},
    {"adam_w_mode": False},
    {"grad_averaging": False},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True},
    {"max_grad_norm": 0.01, "eps": 0.1},
    {"max_grad_norm": 1e9},
    {"max_grad_norm": None},
    {"max_grad_norm": 0},
    {"betas": (0.5, 0.9), "lr": 0.3},
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", LAMB_OPTIONS, ids=str)
def test_fused_lamb_follows_the_paper(dtype: torch.dtype, options: dict[str, Any]) -> None:
    run("FusedLAMB", dtype, {"lr": 0.02, **options}, size=3.0)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("averaging", [False, True])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("norm_type, init_zero", [(2, False), (2, True), (0, False), (0, True)])
def test_fused_novograd_follows_the_paper(
    inside: bool, averaging: bool, correction: bool, norm_type: int, init_zero: bool
) -> None:
    options = {
        "lr": 0.02,
        "reg_inside_moment": inside,
        "grad_averaging": averaging,
        "bias_correction": correction,
        "norm_type": norm_type,
        "init_zero": init_zero,
        "weight_decay": 0.1,
    }
    shapes = SHAPES[:]
    try:
        if norm_type == 0:
            SHAPES.remove((0, 4))  # an empty tensor has no largest value: see the next test
        run("FusedNovoGrad", torch.float64, options)
    finally:
        SHAPES[:] = shapes


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_fused_novograd_of_every_type_follows_the_paper(dtype: torch.dtype, inside: bool) -> None:
    run("FusedNovoGrad", dtype, {"lr": 0.02, "weight_decay": 0.1, "reg_inside_moment": inside})


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("decoupled", [False, True])
def test_fused_adagrad_follows_the_paper(dtype: torch.dtype, decoupled: bool) -> None:
    run("FusedAdagrad", dtype, {"lr": 0.1, "weight_decay": 0.1, "adagrad_w_mode": decoupled})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("correction", [False, True])
def test_fused_adam_follows_the_paper(
    dtype: torch.dtype, decoupled: bool, correction: bool
) -> None:
    options = {"lr": 0.05, "weight_decay": 0.1, "adam_w_mode": decoupled}
    run("FusedAdam", dtype, {**options, "bias_correction": correction})


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_fused_optimizer_counts_steps_in_its_groups(name: str) -> None:
    # The key from which DeepLearningExamples' warm-up schedules read the number of steps.
    params = make_params()
    optimizer = getattr(optimizers, name)([{"params": params[:2]}, {"params": params[2:]}])
    for step in range(3):
        set_grads(params, step, missing=(2, 3, 4) if step == 1 else ())
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    if name == "FusedAdam":
        plain = torch.optim.AdamW(params)
        set_grads(params, 3)
        plain.step()
        fresh = optimizers.FusedAdam(params)
        fresh.load_state_dict(plain.state_dict())
        assert fresh.param_groups[0]["step"] == 1


@pytest.mark.parametrize(
    "name, dtype",
    [*itertools.product(NEW, (torch.float32, torch.float16)), ("FusedAdam", torch.float32)],
    ids=str,
)
def test_fused_optimizer_parameters_without_gradients_stay(name: str, dtype: torch.dtype) -> None:
    options = {"lr": 0.02}
    if name == "FusedAdam":
        options["bias_correction"] = False  # with it, torch counts the steps of each parameter
    run(name, dtype, options, missing=lambda step: {0} if step % 2 else {1, 4})
    params = make_params(dtype)
    before = [p.detach().clone() for p in params]
    getattr(optimizers, name)(params).step()  # no parameter has a gradient
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("name", NEW)
def test_fused_optimizer_of_mixed_types_steps_each_as_alone(name: str) -> None:
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    options = {"max_grad_norm": None} if name == "FusedLAMB" else {}
    together = [make_params(kind)[0] for kind in kinds]
    optimizer = getattr(optimizers, name)(
        [{"params": together[:3]}, {"params": together[3:], "lr": 0.1}, {"params": []}], **options
    )
    alone = [make_params(kind)[0] for kind in kinds]
    others = [getattr(optimizers, name)([p], **options) for p in alone]
    others[3].param_groups[0]["lr"] = 0.1
    for step in range(3):
        for a, b in zip(together, alone, strict=True):
            set_grads([a], step)
            b.grad = a.grad.clone()
        optimizer.step()
        for other in others:
            other.step()
    assert all(map(torch.equal, together, alone))


def test_fused_lamb_clips_by_the_norm_of_all_groups_and_types() -> None:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.float16))]
    optimizer = optimizers.FusedLAMB(
        [{"params": params[:1]}, {"params": params[1:]}], betas=(0.0, 0.0), max_grad_norm=2.5
    )
    params[0].grad = torch.full((4,), 3.0)
    params[1].grad = torch.full((4,), 4.0, dtype=torch.float16)
    optimizer.step()  # the norm is 10, so m, which is the gradient, is divided by 4
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], torch.full((4,), 0.75))
    torch.testing.assert_close(optimizer.state[params[1]]["exp_avg"], torch.full((4,), 1.0))


def test_fused_lamb_norm_of_float16_gradients_does_not_overflow() -> None:
    param = nn.Parameter(torch.ones(1000, dtype=torch.float16))
    optimizer = optimizers.FusedLAMB([param])
    param.grad = torch.full_like(param, 6e4)
    optimizer.step()
    assert param.isfinite().all() and optimizer.state[param]["exp_avg"].isfinite().all()
    assert float(optimizer.state[param]["exp_avg"][0]) == pytest.approx(0.1 / 1000**0.5, rel=1e-4)


def test_fused_optimizer_zero_grad_goes_by_set_grad_none() -> None:
    for name, none in itertools.product(NEW, (True, False)):
        params = make_params()
        optimizer = getattr(optimizers, name)(params, set_grad_none=none)
        set_grads(params, 0)
        optimizer.zero_grad()
        assert (params[0].grad is None) == none
        set_grads(params, 0)
        optimizer.zero_grad(set_to_none=not none)
        assert (params[0].grad is None) != none


@pytest.mark.parametrize("name", NEW)
def test_fused_optimizer_sparse_gradient_refused_before_anything_changes(name: str) -> None:
    table = nn.Embedding(4, 3, sparse=True)
    dense = nn.Parameter(torch.ones(3))
    optimizer = getattr(optimizers, name)([dense, table.weight], lr=1.0)
    (table(torch.tensor([1])) * dense).sum().backward()
    before = dense.detach().clone()
    with pytest.raises(RuntimeError, match="sparse gradients.*parameter 1 of group 0.*SparseAdam"):
        optimizer.step()
    assert torch.equal(dense, before) and not optimizer.state
    param = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="complex gradients"):
        getattr(optimizers, name)([param]).step()


APEX_SIGNATURES = {
    "FusedLAMB": "params lr=0.001 bias_correction=True betas=(0.9, 0.999) eps=1e-06 "
    "weight_decay=0.01 amsgrad=False adam_w_mode=True grad_averaging=True set_grad_none=True "
    "max_grad_norm=1.0 use_nvlamb=False",
    "FusedNovoGrad": "params lr=0.001 bias_correction=True betas=(0.9, 0.999) eps=1e-08 "
    "weight_decay=0.0 amsgrad=False reg_inside_moment=False grad_averaging=True norm_type=2 "
    "init_zero=False set_grad_none=True",
    "FusedAdagrad": "params lr=0.01 eps=1e-10 weight_decay=0.0 set_grad_none=True "
    "adagrad_w_mode=False",
    "FusedAdam": "params lr=0.001 bias_correction=True betas=(0.9, 0.999) eps=1e-08 "
    "adam_w_mode=True weight_decay=0.0 amsgrad=False set_grad_none=True capturable=False "
    "master_weights=False",
}


@pytest.mark.parametrize("name", APEX_SIGNATURES)
def test_fused_optimizer_has_apexs_signature_and_submodule(name: str) -> None:
    kind = getattr(optimizers, name)
    module = {"FusedLAMB": "fused_lamb", "FusedNovoGrad": "fused_novograd"}.get(
        name, f"fused_{name.removeprefix('Fused').lower()}"
    )
    assert getattr(importlib.import_module(f"apex.optimizers.{module}"), name) is kind
    parameters = inspect.signature(kind).parameters.values()
    words = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert " ".join(words) == APEX_SIGNATURES[name]


def test_fused_sgd_is_in_its_submodule() -> None:
    assert importlib.import_module("apex.optimizers.fused_sgd").FusedSGD is optimizers.FusedSGD


@pytest.mark.parametrize(
    "name, options, error, match",
    [
        ("FusedLAMB", {"amsgrad": True}, RuntimeError, "AMSGrad"),
        ("FusedLAMB", {"max_grad_norm": -1.0}, ValueError, "max_grad_norm"),
        ("FusedLAMB", {"lr": -1e-3}, ValueError, "FusedLAMB: lr is -0.001; it must be 0 or more"),
        ("FusedLAMB", {"lr": float("nan")}, ValueError, "lr is nan"),
        ("FusedNovoGrad", {"betas": (0.9, 1.0)}, ValueError, r"betas are \(0.9, 1.0\)"),
        ("FusedAdagrad", {"eps": None}, ValueError, "eps is None"),
        ("FusedAdagrad", {"weight_decay": -1}, ValueError, "weight_decay is -1"),
        ("FusedNovoGrad", {"amsgrad": True}, RuntimeError, "AMSGrad"),
        ("FusedNovoGrad", {"norm_type": 1}, RuntimeError, "norm_type 2"),
        ("FusedAdam", {"max_grad_norm": 1.0}, TypeError, r"clip_grad_norm_\(parameters, 1.0\)"),
        ("FusedAdam", {"eps_inside_sqrt": True}, TypeError, "outside the square root"),
        ("FusedAdam", {"amsgrad": True}, ValueError, "AMSGrad"),
        ("FusedSGD", {"lr": 0.1, "wd_after_momentum": True}, ValueError, "momentum"),
    ],
)
def test_fused_optimizer_setting_refused_says_what_to_do(
    name: str, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        getattr(optimizers, name)(make_params(), **options)
    if name == "FusedAdam":
        optimizers.FusedAdam(make_params(), max_grad_norm=0.0, eps_inside_sqrt=False)


UNFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=False),
    "FusedSGD": lambda params: torch.optim.SGD(
        params, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=False
    ),
}
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=0.01, weight_decay=0.1),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("cut", ["columns", "every second row", "transposed", "expanded rows"])
def test_fused_optimizer_of_a_slice_writes_into_the_slice_alone(name: str, cut: str) -> None:
    """Reference: torch's loop over single tensors. Elements in the gaps must not change."""
    slices: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "columns": lambda base: base[:, :3],
        "every second row": lambda base: base[::2],
        "transposed": lambda base: base.t(),
        "expanded rows": lambda base: base[1:3, 2:5].t(),
    }
    ends = []
    for make in (FUSED[name], UNFUSED[name]):
        base = torch.arange(36.0).reshape(6, 6) / 36
        params = [nn.Parameter(slices[cut](base)), nn.Parameter(torch.ones(5))]
        optimizer = make(params)
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        ends.append((base, params[1].detach()))
    for got, expected in zip(*ends, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    touched = slices[cut](
        torch.zeros(6, 6).copy_(ends[0][0] != torch.arange(36.0).reshape(6, 6) / 36)
    )
    assert touched.sum() == (ends[0][0] != torch.arange(36.0).reshape(6, 6) / 36).sum()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("case", ["moved", "resumed", "gradients by hand", "first step moved"])
def test_fused_optimizer_pairs_elements_by_index_where_strides_differ(name: str, case: str) -> None:
    """Parameter, gradient and state have other memory formats. Reference: torch's loop."""
    ends = []
    for make in (FUSED[name], UNFUSED[name]):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3)
        if case in ("gradients by hand", "first step moved"):
            model.to(memory_format=torch.channels_last)
        optimizer = make(model.parameters())
        for step in range(6):
            if step == 3 and case == "moved":
                model.to(memory_format=torch.channels_last)
            if step == 3 and case == "resumed":
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
                optimizer = make(model.parameters())
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            if step == 1 and case == "first step moved":
                model.to(memory_format=torch.contiguous_format)
            set_grads(model.parameters(), step)
            if case != "gradients by hand":
                for param in model.parameters():
                    like = torch.empty_like(param, requires_grad=False)
                    param.grad = like.copy_(param.grad)
            optimizer.step()
        ends.append([param.detach() for param in model.parameters()])
    for got, expected in zip(*ends, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
