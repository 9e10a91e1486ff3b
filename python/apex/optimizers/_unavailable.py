# SPDX-License-Identifier: BSD-3-Clause
"""Names of Apex's optimizer packages that do not exist here, and their replacements."""

from __future__ import annotations

from typing import Any, NoReturn

FP16_OPTIMIZER = (
    "use apex.fp16_utils.FP16_Optimizer, which wraps any optimizer: "
    "FP16_Optimizer(FusedAdam(params), dynamic_loss_scale=True) with optimizer.backward(loss); or "
    'amp.initialize(model, optimizer, opt_level="O2") with amp.scale_loss'
)
INSTEAD = {
    "FP16_Optimizer": FP16_OPTIMIZER,
    "FusedMixedPrecisionLamb": (
        "use FusedLAMB, with master weights from amp.initialize(model, optimizer, "
        'opt_level="O2"), or on float32 parameters with torch.autocast and torch.amp.GradScaler'
    ),
}


def refuse(package: str, name: str) -> NoReturn:
    """Raise ImportError that names the replacement of ``package.name``."""
    raise ImportError(f"{package} has no {name}: {INSTEAD[name]}.")


def explain(package: str, name: str) -> Any:
    """The implementation of ``__getattr__`` of `package`.

    For a name that Apex had, it raises ImportError instead of AttributeError, whose message Python
    replaces in ``from package import name``.
    """
    if name in INSTEAD:
        refuse(package, name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
