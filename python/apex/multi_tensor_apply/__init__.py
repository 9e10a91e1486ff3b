# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_applier``, for scripts that import it beside :mod:`apex.amp` or ``amp_C``.

It calls the operations of ``amp_C``, which are torch's ``torch._foreach_*`` here. ``available`` is
False: it stands for all of Apex's kernels, those of its optimizers included, and scripts that ask
take their plain path.
"""

from .multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
