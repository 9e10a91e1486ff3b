"""Names of Apex's fused optimizers, as thin aliases of torch's own fused implementations."""

from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD
from .unavailable import FusedLAMB, FusedNovoGrad

__all__ = ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
