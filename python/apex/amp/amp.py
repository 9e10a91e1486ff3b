# SPDX-License-Identifier: BSD-3-Clause
"""The module ``apex.amp.amp`` of NVIDIA's Apex."""

from .casting import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = [
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]
