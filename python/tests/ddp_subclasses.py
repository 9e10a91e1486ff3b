# SPDX-License-Identifier: BSD-3-Clause
"""Tensor subclasses that hold other tensors and have no memory of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map


class Wrapper(Tensor):
    """Every operator runs on the inner tensor, and its result is wrapped again.

    Only its own operators can access the inner tensor.
    """

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner.detach()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        def wrap(value: Any) -> Any:
            return cls(value) if type(value) is Tensor else value

        kwargs = kwargs or {}
        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        return return_and_correct_aliasing(func, args, kwargs, tree_map(wrap, out))


class OpenWrapper(Wrapper):
    """A wrapper that names its inner tensor."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> OpenWrapper:
        return OpenWrapper(inner["inner"])


class Pair(Tensor):
    """Two tensors. Every operator runs on the first tensors, then on the second ones."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Pair:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device
        )
        return made

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a.detach(), b.detach()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pair({self.a}, {self.b})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outs = []
        for name in ("a", "b"):

            def unwrap(value: Any, name: str = name) -> Any:
                return getattr(value, name) if isinstance(value, Pair) else value

            outs.append(func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))
        if isinstance(outs[0], Tensor):
            return return_and_correct_aliasing(func, args, kwargs, Pair(*outs))
        if isinstance(outs[0], (list, tuple)):
            both = zip(*outs, strict=True)
            return type(outs[0])(Pair(*o) if isinstance(o[0], Tensor) else o[0] for o in both)
        return outs[0]


def plain(tensor: Any) -> Any:
    """The values; for a Pair, both stacked."""
    if isinstance(tensor, Wrapper):
        return tensor.inner
    return torch.stack([tensor.a, tensor.b]) if isinstance(tensor, Pair) else tensor


class Enter(torch.autograd.Function):
    """Converts a plain tensor to a Wrapper, or to both of a Pair. The gradient is plain again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type[Tensor]) -> Tensor:
        return Pair(x, x) if kind is Pair else kind(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None]:
        return (grad.a + grad.b if isinstance(grad, Pair) else plain(grad)), None


class Leave(torch.autograd.Function):
    """The values of a Wrapper, or the sum of a Pair. The gradient is a subclass again."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        ctx.kind = type(x)
        return x.a + x.b if isinstance(x, Pair) else x.inner.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Pair(grad, grad.clone()) if ctx.kind is Pair else ctx.kind(grad)


class LeaveAlone(Leave):
    """Leave, with plain gradients."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Quantized(Tensor):
    """Integers and their scale, as in quantized base weights. Only its values are read."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Quantized:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=scale.dtype, device=codes.device
        )
        return made

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @staticmethod
    def of(values: Tensor) -> Quantized:
        scale = values.abs().amax(1, keepdim=True) / 127
        return Quantized((values / scale).round().to(torch.int8), scale)

    def value(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Quantized({self.value()})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Quantized:
        return Quantized(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            made = type(args[0])(args[0].codes, args[0].scale)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if any(isinstance(r.alias_info, object) and r.alias_info and r.alias_info.is_write
               for r in func._schema.arguments):  # fmt: skip
            raise NotImplementedError(f"{func} of a quantized tensor")

        def read(value: Any) -> Any:
            return value.value() if isinstance(value, Quantized) else value

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))
