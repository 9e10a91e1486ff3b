# SPDX-License-Identifier: BSD-3-Clause
"""convert_syncbn_model keeps all state and structure."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.parallel import SyncBatchNorm, convert_syncbn_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(4, eps=1e-3, momentum=None)
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.again = self.bn
        self.parts = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), nn.BatchNorm3d(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.norm(self.bn(x)))


def test_convert_model_keeps_everything_else() -> None:
    model = Block()
    model.bn.eval()
    model.bn.weight.requires_grad_(False)
    model.bn.running_mean.fill_(2.0)
    model.bn.num_batches_tracked.fill_(7)
    model.bn.note = "kept"
    model.parts[1].double()
    calls: list[str] = []
    handle = model.bn.register_forward_hook(lambda *_: calls.append("hook"))
    names = [name for name, _ in model.named_modules()]
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    keys = list(model.state_dict())

    converted = convert_syncbn_model(model)

    assert converted is model
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())
    assert isinstance(model.bn, SyncBatchNorm) and model.again is model.bn
    assert not model.bn.training and model.parts[1].training
    assert not model.bn.weight.requires_grad and model.bn.bias.requires_grad
    assert model.bn.momentum is None and model.bn.eps == 1e-3 and model.bn.note == "kept"
    assert model.bn.num_batches_tracked == 7
    assert model.parts[1].weight.dtype == torch.float64
    assert type(model.norm) is nn.InstanceNorm2d
    model(torch.randn(2, 4, 3, 3))
    assert calls == ["hook", "hook"]
    handle.remove()
    model(torch.randn(2, 4, 3, 3))
    assert calls == ["hook", "hook"]


def test_convert_bare_batch_norm_returns_new_module() -> None:
    plain = nn.BatchNorm2d(3)
    module = convert_syncbn_model(plain, channel_last=True)
    assert isinstance(module, SyncBatchNorm) and module is not plain and module.channel_last
    assert module.weight is plain.weight and module.running_var is plain.running_var
    assert module(torch.randn(2, 4, 4, 3)).shape == (2, 4, 4, 3)


def test_convert_batch_norm_without_bias_keeps_it_so() -> None:
    try:
        plain = nn.BatchNorm2d(3, bias=False)
    except TypeError:
        pytest.skip("this torch has no batch norm without bias")
    plain.weight.data.uniform_()
    x, other = (torch.ones(2, 3, 4, 4).cumsum(-1).requires_grad_() for _ in range(2))
    module = convert_syncbn_model(plain)
    assert module.bias is None
    y = module(x)
    twin = nn.BatchNorm2d(3, bias=False)
    twin.load_state_dict(plain.state_dict())
    want = twin(other)
    torch.testing.assert_close(y, want)
    y.exp().sum().backward()
    want.exp().sum().backward()
    torch.testing.assert_close(module.weight.grad, twin.weight.grad)


def test_convert_torch_sync_batch_norm_is_converted() -> None:
    module = convert_syncbn_model(nn.Sequential(nn.SyncBatchNorm(3)))[0]
    assert type(module) is SyncBatchNorm and module.process_group is None


class Scaled(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_convert_derived_class_stays_with_one_warning() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(Scaled(4), nn.BatchNorm2d(4)), Scaled(4))
    kept = model[1][0], model[2]
    with pytest.warns(UserWarning) as caught:
        assert convert_syncbn_model(model) is model
    (message,) = (str(each.message) for each in caught)
    name = f"{Scaled.__module__}.{Scaled.__qualname__}"
    assert f"module '1.0' and 1 more ({name}) was not converted" in message
    assert caught[0].filename == __file__
    assert type(model[0]) is SyncBatchNorm and type(model[1][1]) is SyncBatchNorm
    assert (model[1][0], model[2]) == kept
    model[0] = nn.BatchNorm2d(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="'1.0'"):
            convert_syncbn_model(model)
    assert type(model[0]) is nn.BatchNorm2d


def test_convert_state_dict_hook_sees_the_new_module() -> None:
    plain = nn.BatchNorm1d(2)
    seen: list[nn.Module] = []
    plain.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    module = convert_syncbn_model(plain)
    del plain
    module.load_state_dict(SyncBatchNorm(2).state_dict())
    assert seen == [module]


def _with_forward() -> nn.Module:
    module = nn.BatchNorm2d(4)
    module.forward = types.MethodType(lambda self, x: 2 * nn.BatchNorm2d.forward(self, x), module)
    return module


def _compiled_in_place() -> nn.Module:
    module = nn.BatchNorm2d(4)
    module.compile(backend="eager")
    return module


def _of_a_strange_group() -> nn.Module:
    module = nn.SyncBatchNorm(4)
    module.process_group = dist.GroupMember.NON_GROUP_MEMBER
    return module


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_with_forward, TypeError, "module '1.0' has a forward that was replaced .* Convert first"),
        (_compiled_in_place, TypeError, "'1.0' is compiled, .* Convert first"),
        (lambda: torch.compile(nn.BatchNorm2d(4), backend="eager"), TypeError,
         "'1.0' is compiled, .* Convert first"),
        (lambda: nn.LazyBatchNorm2d(), TypeError, "'1.0' is a LazyBatchNorm2d"),
        (_of_a_strange_group, ValueError, "not a member of its process_group"),
    ],
    ids=["forward", "compiled_in_place", "compiled", "lazy", "strange_group"],
)  # fmt: skip
def test_convert_refused_in_the_middle_leaves_the_model_untouched(
    make: Any, error: type[Exception], message: str
) -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(4), nn.Sequential(make()), SyncBatchNorm(4), nn.BatchNorm2d(4)
    )
    before = [(name, id(module)) for name, module in model.named_modules()]
    hooked = model[0].register_load_state_dict_pre_hook(lambda *_: None)
    (hook,) = model[0]._load_state_dict_pre_hooks.values()
    with pytest.raises(error, match=message):
        convert_syncbn_model(model, channel_last=True)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    assert not model[2].channel_last
    assert hook.module() is model[0]
    hooked.remove()


def test_convert_to_a_strange_group_leaves_the_model_untouched() -> None:
    for model in (nn.Sequential(nn.BatchNorm2d(4)), nn.Sequential(SyncBatchNorm(4))):
        kind = type(model[0])
        with pytest.raises(ValueError, match="not a member"):
            convert_syncbn_model(model, dist.GroupMember.NON_GROUP_MEMBER, channel_last=True)
        assert type(model[0]) is kind and not getattr(model[0], "channel_last", False)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_convert_scripted_batch_norm_warns_with_its_name() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    traced = torch.jit.trace(nn.BatchNorm2d(4).eval(), torch.randn(2, 4, 3, 3))
    model = nn.Sequential(nn.BatchNorm2d(4), scripted, traced)
    with pytest.warns(UserWarning, match="convert_syncbn_model") as caught:
        convert_syncbn_model(model)
    messages = [str(each.message) for each in caught]
    assert len(messages) == 1
    assert "module '1.1' and 1 more (a scripted BatchNorm2d) was not converted" in messages[0]
    assert type(model[0]) is SyncBatchNorm and model[1] is scripted
