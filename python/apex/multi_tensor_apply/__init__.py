"""``multi_tensor_applier``, for scripts that import it beside :mod:`apex.amp`.

The fused kernels it used to launch are torch's own ``torch._foreach_*`` and fused optimizers now,
so there is no extension behind it and ``available`` is False, which sends scripts that ask to
their plain path.
"""

from .multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
