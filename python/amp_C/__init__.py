# SPDX-License-Identifier: BSD-3-Clause
"""The functions of Apex's extension module ``amp_C`` that scripts call themselves.

On torch's foreach operators, on every device; see ``apex/multi_tensor_apply/_operations.py``. The
kernels of Apex's optimizers are not here.
"""

from typing import Any

from apex._internal import not_served
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


def __getattr__(name: str) -> Any:
    if f"amp_C.{name}" in not_served.INSTEAD:
        not_served.refuse(f"amp_C.{name}", AttributeError)
    raise AttributeError(f"module 'amp_C' has no attribute {name!r}")
