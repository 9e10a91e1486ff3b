# SPDX-License-Identifier: BSD-3-Clause
"""The functions that level O1 runs in each dtype.

Names are looked up in three namespaces, ``torch``, ``torch.nn.functional`` and ``Tensor``. Names
that do not exist in the installed torch are ignored. Unlisted functions run in the dtype of their
inputs, following torch's own rules (``add``, ``mul``, comparisons, ``cat`` and ``stack`` promote to
the widest dtype).

The defaults are the tuples in ``defaults``. As in Apex, there is a module per namespace
(``torch_overrides``, ``functional_overrides``, ``tensor_overrides``), whose lists ``FP16_FUNCS``,
``FP32_FUNCS``, ``CASTS`` and ``BANNED_FUNCS`` may be changed before :func:`apex.amp.initialize`.
"""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
