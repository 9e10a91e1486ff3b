# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_applier``, for scripts that import it together with :mod:`apex.amp` or ``amp_C``.

It calls the operations of ``amp_C``, which use torch's ``torch._foreach_*`` here. ``available`` is
False, because it stands for all of Apex's kernels, including those of its optimizers. Scripts that
check it use their fallback.
"""

from .multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
