# SPDX-License-Identifier: BSD-3-Clause
"""Mixed-precision training with the interface of NVIDIA Apex's ``amp``.

Typical use::

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    ...
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""

from . import compat, frontend, lists, rnn_compat, scaler
from ._amp_state import _amp_state, master_params
from .amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts
from .scaling import scale_loss

__all__ = [
    "_amp_state",
    "compat",
    "disable_casts",
    "float_function",
    "frontend",
    "half_function",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "rnn_compat",
    "scale_loss",
    "scaler",
    "state_dict",
]
