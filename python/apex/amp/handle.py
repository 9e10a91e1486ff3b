# SPDX-License-Identifier: BSD-3-Clause
"""The module ``apex.amp.handle`` of NVIDIA's Apex."""

from .casting import AmpHandle, NoOpHandle, disable_casts
from .scaling import scale_loss

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]
