"""The parameters and buffers of a module that a wrapper synchronizes: all but the ignored ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn


def named_parameters(
    module: nn.Module, ignored: Collection[str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """``module.named_parameters()`` without those named in `ignored`."""
    if not ignored:
        return module.named_parameters()
    return ((name, p) for name, p in module.named_parameters() if name not in ignored)


def parameters(module: nn.Module, ignored: Collection[str]) -> list[nn.Parameter]:
    """The parameters of :func:`named_parameters`."""
    if not ignored:
        return list(module.parameters())
    return [parameter for _, parameter in named_parameters(module, ignored)]
