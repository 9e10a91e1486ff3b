# SPDX-License-Identifier: BSD-3-Clause
"""The functions of Apex's extension module ``amp_C`` that scripts call themselves.

On torch's foreach operators, on every device; see ``apex/multi_tensor_apply/_operations.py``. The
kernels of Apex's optimizers are not here.
"""

from typing import Any

from apex.multi_tensor_apply._operations import (
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
)

__all__ = [
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
]

#: What Apex's module has besides, and what to use for it.
INSTEAD = {
    "multi_tensor_sgd": "apex.optimizers.FusedSGD",
    "multi_tensor_adam": "apex.optimizers.FusedAdam",
    "multi_tensor_adam_capturable": "apex.optimizers.FusedAdam(capturable=True)",
    "multi_tensor_adam_capturable_master": "apex.optimizers.FusedAdam with amp's level O2",
    "multi_tensor_adagrad": "apex.optimizers.FusedAdagrad",
    "multi_tensor_novograd": "apex.optimizers.FusedNovoGrad",
    "multi_tensor_lamb": "apex.optimizers.FusedLAMB",
    "multi_tensor_lamb_mp": "apex.optimizers.FusedLAMB with amp's level O2",
    "multi_tensor_lamb_stage1_cuda": "apex.optimizers.FusedLAMB",
    "multi_tensor_lamb_stage2_cuda": "apex.optimizers.FusedLAMB",
    "multi_tensor_lars": "apex.parallel.LARC.LARC(torch.optim.SGD(...), clip=False)",
    "multi_tensor_l2norm_mp": "amp_C.multi_tensor_l2norm",
    "multi_tensor_l2norm_scale": "amp_C.multi_tensor_scale, then amp_C.multi_tensor_l2norm",
    "update_scale_hysteresis": "torch.amp.GradScaler, or amp.scale_loss",
}


def __getattr__(name: str) -> Any:
    if name in INSTEAD:
        raise AttributeError(f"amp_C has no {name} here: use {INSTEAD[name]}.")
    raise AttributeError(f"module 'amp_C' has no attribute {name!r}")
