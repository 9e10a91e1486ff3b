# SPDX-License-Identifier: BSD-3-Clause
"""Level O1: the dtype in which each class of functions runs, and disabling it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amp_support import fresh_amp  # noqa: F401
from sync_batch_norm_support import DEVICES
from torch import nn

from apex import amp
from apex.amp import _amp_state

DTYPES = [torch.float16, torch.bfloat16]


def start(device: str, dtype: torch.dtype = torch.float16, **options: object) -> object:
    return amp.init(dtype=dtype, device_types=(device,), **options)


def prepare(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)


def matrix(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # Positive and below 1, so in the domain of every function in the tables.
    return torch.linspace(0.1, 0.9, 16, device=device).reshape(4, 4).to(dtype)


def image(device: str, dtype: torch.dtype = torch.float32, dims: int = 2) -> torch.Tensor:
    return torch.rand(2, 3, *[6] * dims, device=device).to(dtype)


def kernel(device: str, dims: int) -> torch.Tensor:
    return torch.rand(3, 3, *[3] * dims, device=device)


# Functions of each mechanism: autocast's, wrapped ones, and methods and operators.
LOW = {
    "linear": lambda x: F.linear(x, torch.rand_like(x, dtype=torch.float32)),
    "operator": lambda x: x @ x.float(),
    "mv": lambda x: torch.mv(x, x.float()[0]),
    "addmv": lambda x: torch.addmv(x[0], x, x[0].float()),
    "addr": lambda x: torch.addr(x, x[0], x[0].float()),
    "keyword": lambda x: F.linear(input=x, weight=x.float()),
}
FLOAT32 = {
    "softmax": lambda x: F.softmax(x, dim=1),
    "torch_softmax": lambda x: torch.softmax(x, 1),
    "tensor_softmax": lambda x: x.softmax(1),
    "gelu": lambda x: F.gelu(x),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2),
    "grid_sample": lambda x: F.grid_sample(x[None, None], x[None, :, :2, None].expand(1, 4, 2, 2),
                                           align_corners=False),
    "mse_loss": lambda x: F.mse_loss(x, x.float()),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4, device=x.device)),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "pow": lambda x: x.pow(2),
    "operator_pow": lambda x: x**2,
    "operator_rpow": lambda x: 2**x,
    "tensor_cpu": lambda x: x.cpu(),
    "norm": lambda x: x.norm(),
    **{
        f"torch_{name}": (lambda x, name=name: getattr(torch, name)(x))
        for name in "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan "
        "prod std sum var".split()
    },
    **{
        f"tensor_{name}": (lambda x, name=name: getattr(x, name)(0))
        for name in "cumprod cumsum prod std sum var".split()
    },
}  # fmt: skip
FOLLOW = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "add": lambda x: x + x,
    "mul": lambda x: x * 2,
    "max_pool": lambda x: F.max_pool1d(x, 2),
    "dropout": lambda x: F.dropout(x, 0.5),
    "transpose": lambda x: x.t(),
    "mean": lambda x: x.mean(),
    "batch_norm": lambda x: F.batch_norm(
        x, torch.zeros(4, device=x.device), torch.ones(4, device=x.device), training=True
    ),
}
PROMOTE = {
    "add": lambda x, y: x + y,
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "vdot": lambda x, y: torch.vdot(x[0], y[0]),
    "inner_of_matrices": lambda x, y: torch.inner(x, y),
    "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack((x, y)),
    "bilinear": lambda x, y: F.bilinear(x, y, torch.rand(2, 4, 4, device=x.device)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOW)
def test_o1_low_precision_function_casts_every_argument(
    name: str, low: torch.dtype, device: str
) -> None:
    start(device, low)
    for dtype in (torch.float32, low):
        x = matrix(device, dtype).requires_grad_()
        y = LOW[name](x)
        assert y.dtype == low
        y.float().sum().backward()
        assert x.grad is not None and x.grad.dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_o1_convolution_runs_in_low_precision(
    transposed: bool, dims: int, low: torch.dtype, device: str
) -> None:
    start(device, low)
    function = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    for dtype in (torch.float32, low):
        x = image(device, dtype, dims).requires_grad_()
        y = function(x, kernel(device, dims))
        assert y.dtype == low
        y.float().sum().backward()
        assert x.grad.dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOAT32)
def test_o1_float32_function_casts_up(name: str, low: torch.dtype, device: str) -> None:
    start(device, low)
    for dtype in (torch.float32, low):
        x = matrix(device, dtype).requires_grad_()
        y = FLOAT32[name](x)
        assert y.dtype == torch.float32
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FOLLOW)
def test_o1_unlisted_function_follows_its_input(name: str, device: str) -> None:
    start(device)
    for dtype in (torch.float32, torch.float16):
        assert FOLLOW[name](matrix(device, dtype)).dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PROMOTE)
def test_o1_promoting_function_takes_the_widest_type(name: str, device: str) -> None:
    start(device)
    half, single = matrix(device, torch.float16), matrix(device)
    assert PROMOTE[name](half, single).dtype == torch.float32
    assert PROMOTE[name](single, half).dtype == torch.float32
    assert PROMOTE[name](single, single).dtype == torch.float32
    if name != "bilinear":  # bilinear has a float32 argument
        mixed = PROMOTE[name](half, single)
        with amp.disable_casts():
            assert torch.equal(mixed, PROMOTE[name](half.float(), single))
    if name != "bilinear":
        assert PROMOTE[name](half, half).dtype == torch.float16


@pytest.mark.parametrize("device", DEVICES)
def test_o1_integers_and_doubles_stay(device: str) -> None:
    start(device)
    index = torch.arange(4, device=device)
    assert index.sum().dtype == torch.int64
    if device == "cpu":  # CUDA has no integer matrix product
        assert (index @ index).dtype == torch.int64
    double = matrix(device, torch.float64)
    assert (double @ double).dtype == torch.float64
    assert torch.exp(double).dtype == torch.float64


@pytest.mark.parametrize("device", DEVICES)
def test_o1_binary_cross_entropy_on_half_raises_unless_allowed(device: str) -> None:
    half, single = matrix(device, torch.float16), matrix(device)
    expected = F.binary_cross_entropy(half.float(), half.float())
    handle = start(device)
    with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(half, half)
    with pytest.raises(NotImplementedError):
        nn.BCELoss()(half, single)
    assert F.binary_cross_entropy(single, single).dtype == torch.float32
    handle._deactivate()
    start(device, allow_banned=True)
    assert torch.equal(F.binary_cross_entropy(half, half), expected)


RECURRENT = [
    (module, as_low)
    for as_low in (False, True)
    for module in (
        lambda: nn.RNN(4, 5, num_layers=2),
        lambda: nn.RNN(4, 5, nonlinearity="relu", bias=False),
        lambda: nn.LSTM(4, 5, bidirectional=True),
        lambda: nn.LSTM(4, 5, batch_first=True, num_layers=2, dropout=0.1),
        lambda: nn.GRU(4, 5),
        lambda: nn.RNNCell(4, 5),
        lambda: nn.LSTMCell(4, 5),
        lambda: nn.GRUCell(4, 5),
    )
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", DTYPES, ids=str)
@pytest.mark.parametrize("make, as_low", RECURRENT)
def test_o1_recurrent_module_runs_in_low_precision_and_trains(
    make: object, as_low: bool, low: torch.dtype, device: str
) -> None:
    module = make().to(device)
    shape = (3, 2, 4) if isinstance(module, nn.RNNBase) else (2, 4)
    start(device, low)
    inputs = low if as_low else torch.float32
    x = torch.rand(shape, device=device).to(inputs).requires_grad_()
    output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    assert output.dtype == low
    output.float().sum().backward()
    assert x.grad.dtype == inputs
    for name, param in module.named_parameters():
        assert param.grad is not None and param.grad.dtype == torch.float32, name


@pytest.mark.parametrize("device", DEVICES)
def test_o1_packed_sequence_runs_in_half(device: str) -> None:
    start(device)
    lstm = nn.LSTM(4, 5).to(device)
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(3, 2, 4, device=device), [3, 2])
    output, (hidden, _) = lstm(packed)
    assert output.data.dtype == hidden.dtype == torch.float16


@pytest.mark.parametrize("device", DEVICES)
def test_o1_function_newer_than_the_lists_follows_autocast(device: str) -> None:
    start(device)
    x = matrix(device)
    assert torch.einsum("ij,jk->ik", x, x.half()).dtype == torch.float16
    q = torch.rand(1, 2, 4, 8, device=device)
    assert F.scaled_dot_product_attention(q, q.half(), q).dtype == torch.float16


def test_disable_casts_nested_restores_in_order() -> None:
    handle = start("cpu")
    x = matrix("cpu")
    with amp.disable_casts():
        assert not handle.is_active()
        assert (x @ x).dtype == torch.float32
        with amp.disable_casts():
            assert torch.exp(x.half()).dtype == torch.float16
        assert (x @ x).dtype == torch.float32
    assert handle.is_active()
    assert (x @ x).dtype == torch.float16


def test_torch_autocast_disabled_inside_o1_is_respected() -> None:
    start("cpu")
    x = matrix("cpu")
    with torch.autocast("cpu", enabled=False):
        assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float16


def test_deactivate_restores_every_patched_function_and_autocast() -> None:
    owners = (torch, F, torch.Tensor, torch._VF, torch.autograd)
    before = [dict(vars(owner)) for owner in owners]
    handle = start("cpu")
    assert torch.is_autocast_enabled("cpu") and torch.Tensor.exp is not before[2].get("exp")
    assert [dict(vars(owner)) for owner in owners] != before
    handle._deactivate()
    handle._deactivate()
    assert not handle.is_active()
    assert [dict(vars(owner)) for owner in owners] == before
    assert not torch.is_autocast_enabled("cpu")


def test_init_disabled_handle_does_nothing() -> None:
    handle = amp.init(enabled=False)
    assert not handle.is_active() and _amp_state.handle is handle
    handle._clear_cache()
    handle._deactivate()


def test_out_argument_is_written_to_and_not_cast() -> None:
    start("cpu")
    x, out = matrix("cpu"), torch.empty(4, 4)
    torch.matmul(x, x, out=out)
    with amp.disable_casts():
        assert torch.equal(out, torch.matmul(x, x))


def test_verbose_handle_names_the_cast(capsys: pytest.CaptureFixture[str]) -> None:
    start("cpu", verbose=True)
    torch.mv(matrix("cpu"), matrix("cpu")[0])
    assert "torch.float32 -> torch.float16 (mv)" in capsys.readouterr().out


class Functions:
    """A stand-in for a module with user functions."""

    @staticmethod
    def kinds(x: torch.Tensor, others: list[torch.Tensor], last: torch.Tensor) -> set[torch.dtype]:
        return {x.dtype, *(other.dtype for other in others), last.dtype}


@pytest.mark.parametrize(
    "kind, expected",
    [("half", torch.float16), ("float", torch.float32), ("promote", torch.float32)],
)
def test_user_function_decorated_or_registered_casts_nested_arguments(
    kind: str, expected: torch.dtype
) -> None:
    half, single = matrix("cpu", torch.float16), matrix("cpu")
    call = (half, [single, half])
    original = Functions.kinds
    decorated = getattr(amp, f"{kind}_function")(original)
    register = getattr(amp, f"register_{kind}_function")
    register(Functions, "kinds")
    mixed = {torch.float16, torch.float32}
    assert decorated(*call, last=single) == mixed and Functions.kinds(*call, last=single) == mixed
    handle = start("cpu")
    assert decorated(*call, last=single) == {expected}
    assert Functions.kinds(*call, last=single) == {expected}
    with amp.disable_casts():
        assert decorated(*call, last=single) == mixed
    handle._deactivate()
    assert Functions.kinds is original
    start("cpu")
    assert Functions.kinds is original, "the registry was not emptied"
    with pytest.raises(ValueError, match="no_such"):
        register(Functions, "no_such")


@pytest.mark.parametrize("name", ["mm", "matmul", "einsum", "linear", "conv1d", "Tensor.mm"])
def test_builtin_registered_as_float_computes_in_float32(name: str) -> None:
    """The sum 300 * 300 * 2 is inf in float16, to which the lists and autocast would cast."""
    a = torch.full((2, 2), 300.0)
    calls: dict[str, tuple[Any, Any]] = {
        "mm": (torch, lambda: torch.mm(a, a)),
        "matmul": (torch, lambda: torch.matmul(a.half(), a)),
        "einsum": (torch, lambda: torch.einsum("ij,jk->ik", a, a)),
        "linear": (nn.functional, lambda: nn.functional.linear(a, nn.Parameter(a))),
        "conv1d": (nn.functional, lambda: nn.functional.conv1d(a[None], a[:, :, None])),
        "Tensor.mm": (torch.Tensor, lambda: a.mm(a)),
    }
    module, call = calls[name]
    function = name.removeprefix("Tensor.")
    original = getattr(module, function)
    amp.register_float_function(module, function)
    handle = start("cpu")
    out = call()
    assert out.dtype == torch.float32 and out.unique().tolist() == [180000.0]
    assert torch.bmm(a[None], a[None]).dtype == torch.float16, "another function"
    handle._deactivate()
    assert getattr(module, function) is original


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "gelu", "exp"])
def test_builtin_registered_as_half_computes_in_float16(name: str) -> None:
    """For functions that the lists run in float32. As in Apex, the user's registration wins."""
    module = torch if name == "exp" else nn.functional
    more = {"softmax": (1,), "layer_norm": ((3,),)}.get(name, ())
    amp.register_half_function(module, name)
    start("cpu")
    assert getattr(module, name)(torch.ones(2, 3), *more).dtype == torch.float16


def test_checkpointed_segment_recomputes_with_the_same_types() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=1), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    start("cpu")
    x = matrix("cpu")
    model(x).float().sum().backward()
    for reentrant in (False, True):
        twin.zero_grad()
        y = torch.utils.checkpoint.checkpoint(
            twin, x.clone().requires_grad_(), use_reentrant=reentrant
        )
        y.float().sum().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def test_scale_loss_body_runs_without_casts() -> None:
    seen: list[torch.dtype] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            seen.append((x @ x).dtype)
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append((grad @ grad).dtype)
            return grad

    x = matrix("cpu").requires_grad_()
    optimizer = torch.optim.SGD([x], lr=1.0)
    for options in ({}, {"loss_scale": 1.0}):
        amp.initialize(nn.Linear(1, 1), optimizer, opt_level="O1", verbosity=0, **options)
        with amp.scale_loss(Probe.apply(x).sum(), optimizer) as loss:
            loss.backward()
        del optimizer._amp_stash
    assert seen == [torch.float16, torch.float32] * 2


@pytest.mark.parametrize("inside, expected", [(torch.bfloat16, 1e6), (torch.float16, float("inf"))])
def test_autocast_inside_o1_has_its_own_type(inside: torch.dtype, expected: float) -> None:
    amp.init(device_types=("cpu",))
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    x = torch.full((1, 1), 1e6)  # exceeds float16
    with torch.autocast("cpu", dtype=inside):
        result = linear(x)
        product = x @ torch.ones(1, 1)
        cell = nn.RNNCell(1, 1)(x)
    assert {t.dtype for t in (result, product, cell)} == {inside}
    torch.testing.assert_close(result.item(), expected, rtol=1e-2, atol=0)
    torch.testing.assert_close(product.item(), expected, rtol=1e-2, atol=0)
    assert linear(torch.ones(1, 1)).dtype == torch.float16
    with torch.autocast("cpu"):
        assert linear(torch.ones(1, 1)).dtype == torch.float16


def test_compiled_model_runs_in_half_and_trains() -> None:
    model, optimizer = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = torch.rand(3, 4)
    expected = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        output = compiled(x)
        assert output.dtype == torch.float16
        torch.testing.assert_close(output, expected)
        optimizer.zero_grad()
        with amp.scale_loss(output.float().sum(), optimizer) as scaled:
            scaled.backward()
        assert model[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("cuda", [False, True])
def test_o1_casts_on_the_models_devices_and_on_cuda_if_there_is_one(
    cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert _amp_state.handle.device_types == ({"cpu", "cuda"} if cuda else {"cpu"})
