"""Optimizers of Apex that torch has no implementation of: constructing one says what to use."""

from __future__ import annotations

from typing import Any


class FusedLAMB:
    """Not available; constructing it raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "FusedLAMB is not part of this package and torch has no LAMB; for large batches use "
            "apex.parallel.LARC.LARC around torch.optim.SGD or AdamW, or a LAMB from another "
            "package."
        )


class FusedNovoGrad:
    """Not available; constructing it raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "FusedNovoGrad is not part of this package and torch has no NovoGrad; use "
            "torch.optim.AdamW(fused=True), or a NovoGrad from another package."
        )
