# SPDX-License-Identifier: BSD-3-Clause
"""Names of Apex's support for recurrent modules. Here, level O1 casts these without it."""

from __future__ import annotations

from typing import Any

import torch

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


class VariableFunctionsShim:
    """Provides the functions of ``torch._VF`` that recurrent modules and cells call."""

    def __init__(self) -> None:
        for name in RNN_NAMES:
            for suffix in ("", "_cell"):
                setattr(self, name + suffix, getattr(torch._VF, name + suffix))


def has_old_rnns() -> bool:
    """Whether torch is older than 1.0. Always False."""
    return False


def whitelist_rnn_cells(handle: Any, verbose: bool) -> None:
    """Does nothing: level O1 casts recurrent cells."""
