# SPDX-License-Identifier: BSD-3-Clause
"""The operators torch.ops.apex.* refuse invalid arguments before anything is read or sent, also in
their fake implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apex._core  # noqa: F401  (registers torch.ops.apex)
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.apex


def _forward() -> dict[str, Any]:
    return {
        "input": torch.randn(4, 3, 5), "weight": torch.ones(3), "bias": torch.zeros(3),
        "running_mean": torch.zeros(3), "running_var": torch.ones(3),
        "num_batches_tracked": torch.tensor(0), "momentum": 0.1, "eps": 1e-5, "group_name": "",
    }  # fmt: skip


def _backward() -> dict[str, Any]:
    return {
        "grad_output": torch.randn(4, 3, 5), "input": torch.randn(4, 3, 5),
        "weight": torch.ones(3), "mean": torch.zeros(3).double(),
        "invstd": torch.ones(3).double(), "count": torch.tensor([20]),
        "needs": [True, True, True], "group_name": "",
    }  # fmt: skip


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "forward": (OPS.sync_batch_norm, _forward),
    "backward": (OPS.sync_batch_norm_backward, _backward),
}
CASES = [
    (operator, name)
    for operator, (_, make) in CALLS.items()
    for name, value in make().items()
    if isinstance(value, Tensor)
]


def _misfits(name: str, value: Tensor) -> list[tuple[Tensor, type[Exception]]]:
    """Invalid values for a tensor argument."""
    if name in ("count", "num_batches_tracked"):
        wrong = [value.new_zeros(0), value.new_zeros(2), value == 0, value.to(torch.complex64)]
        wrong += [value.double()] * (name == "count")
        return [(each, ValueError) for each in (*wrong, value.to("meta"))]
    found = [(value.long(), TypeError), (value.to(torch.complex64), TypeError)]
    if name == "input":
        wrong = [value[:2, :2], value[0, 0], value.sum()]
    elif name == "grad_output":
        wrong = [value[:2], value[:, :2], value[..., :1], value[0], value.new_zeros(0)]
    else:  # of each channel
        wrong = [value[:2], value[:0], value[0], value.repeat(2), value.view(1, 3)]
    if name != "input":
        wrong.append(value.to("meta"))
    return found + [(each, ValueError) for each in wrong]


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(("operator", "name"), CASES)
def test_operator_refuses_a_tensor_that_does_not_fit(operator: str, name: str, fake: bool) -> None:
    call, make = CALLS[operator]
    call(*make().values())
    for value, error in _misfits(name, make()[name]):
        arguments = make() | {name: value}
        if fake:
            if value.is_meta:  # torch's fake tensors then find no common device
                error = RuntimeError
            mode = FakeTensorMode()
            arguments = {
                key: mode.from_tensor(each) if isinstance(each, Tensor) else each
                for key, each in arguments.items()
            }
        with pytest.raises(error, match="apex sync batch norm|at least 2D|on the same device"):
            call(*arguments.values())
            pytest.fail(f"taken: {name} of {value.dtype} {list(value.shape)} on {value.device}")


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_operator_refuses_expanded_running_statistics(name: str) -> None:
    arguments = _forward() | {name: torch.ones(1).expand(3)}
    with pytest.raises(ValueError, match=f"{name} is expanded, .* clone"):
        OPS.sync_batch_norm(*arguments.values())
    # Read-only arguments may be expanded.
    OPS.sync_batch_norm(*(_forward() | {"weight": torch.ones(1).expand(3)}).values())


def test_operator_refuses_eps_of_zero_as_torch_does() -> None:
    with pytest.raises(ValueError, match="eps must be positive during training, but got 0"):
        OPS.sync_batch_norm(*(_forward() | {"eps": 0.0}).values())


def test_operator_needs_a_group_that_exists() -> None:
    for call, make in CALLS.values():
        with pytest.raises(RuntimeError, match="no process group is registered as 'gone'"):
            call(*(make() | {"group_name": "gone"}).values())
