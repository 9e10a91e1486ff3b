# SPDX-License-Identifier: BSD-3-Clause
"""Which functions run in which type at level O1.

Names are looked up in three namespaces, ``torch``, ``torch.nn.functional`` and ``Tensor``; one that
does not exist in the installed torch is passed over. What is in no list follows the type of its
inputs, as torch does by itself (``add``, ``mul``, comparisons, ``cat`` and ``stack`` promote to the
widest type).

The defaults are the tuples of ``defaults``. For each namespace there is a module, as in Apex
(``torch_overrides``, ``functional_overrides``, ``tensor_overrides``), whose lists ``FP16_FUNCS``,
``FP32_FUNCS``, ``CASTS`` and ``BANNED_FUNCS`` may be changed before :func:`apex.amp.initialize`.
"""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
