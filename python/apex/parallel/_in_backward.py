# SPDX-License-Identifier: BSD-3-Clause
"""Detects optimizers that torch steps inside backward, before the gradients are averaged."""

from __future__ import annotations

import sys
from collections.abc import Container

import torch.distributed as dist
from torch import nn

_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def parameters_known() -> int:
    """The number of parameters that torch steps with an optimizer in backward. Free to call."""
    module = sys.modules.get(_MODULE)
    return 0 if module is None else len(module.param_to_optim_hook_handle_map)


def refuse(module: nn.Module, group: dist.ProcessGroup, ignored: Container[str] = ()) -> None:
    """Check that no parameter of ``module`` is stepped in backward, if there are several ranks.

    Parameters named in ``ignored`` are exempt.

    Raises:
        RuntimeError: if a parameter is stepped in backward.
    """
    if dist.get_world_size(group) == 1:
        return
    for name, parameter in module.named_parameters():
        if name not in ignored and getattr(parameter, "_in_backward_optimizers", None):
            raise RuntimeError(
                f"rank {group.rank()}: an optimizer steps parameter '{name}' inside backward "
                "(torch.distributed.optim._apply_optimizer_in_backward), with this rank's own "
                "gradient instead of the average. Step after backward. To overlap steps with "
                "communication, use apex.parallel.OverlappedOptimizer or "
                "DistributedDataParallel.register_bucket_callback."
            )
