# SPDX-License-Identifier: BSD-3-Clause
"""The functions that level O1 runs in each dtype, unless a script changes the lists."""

from __future__ import annotations

from typing import Any

_LOW_PRECISION = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "conv_tbc", "linear", "prelu", "addmm", "addmv", "addr", "addbmm", "baddbmm", "bmm", "matmul",
    "mm", "mv", "__matmul__", "__rmatmul__",
)  # fmt: skip

#: Functions with large ranges, sums over many elements, losses.
_FLOAT32 = (
    "softmax", "log_softmax", "softmin", "softplus", "gelu", "layer_norm", "group_norm",
    "local_response_norm", "normalize", "cosine_similarity", "interpolate", "grid_sample",
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "ctc_loss",
    "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal",
    "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__",
    "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm",
)  # fmt: skip

#: Promote their arguments to the widest dtype among them, where torch itself would raise.
PROMOTE = ("bilinear", "cross", "dot", "inner", "vdot")

_PROMOTED_BY_TORCH = (
    "addcdiv", "addcmul", "atan2", "add", "div", "mul", "eq", "equal", "ge", "gt", "le", "lt", "ne",
    "__add__", "__div__", "__eq__", "__ge__", "__gt__", "__iadd__", "__idiv__", "__imul__",
    "__isub__", "__itruediv__", "__le__", "__lt__", "__mul__", "__ne__", "__radd__", "__rdiv__",
    "__rmul__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__",
)  # fmt: skip
_SEQUENCES = ("cat", "stack")

#: Names in the lists that need no wrapper: torch promotes their arguments, or ``torch.autocast``
#: casts them on the CPU and on CUDA. (On CUDA it casts more, and the wrappers find nothing to do.)
DONE_BY_TORCH = {*_PROMOTED_BY_TORCH, *_SEQUENCES, *_LOW_PRECISION} - {"addmv", "addr", "mv"}

#: The recurrent kernels in ``torch._VF``, which autocast does not cast on the CPU.
RECURRENT = (
    "rnn_tanh", "rnn_relu", "lstm", "gru",
    "rnn_tanh_cell", "rnn_relu_cell", "lstm_cell", "gru_cell",
)  # fmt: skip

#: Overflows on low-precision inputs: name and remedy.
BANNED = (
    "binary_cross_entropy",
    "use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) on the values before the sigmoid, "
    "which is safe, or cast the inputs with .float(), or pass allow_banned=True to amp.init",
)


def lists_of(module: Any) -> tuple[list[str], list[str], list[str], list[str]]:
    """The names that exist in `module`: low precision, float32, promoted, promoted in a
    sequence."""
    groups = (_LOW_PRECISION, _FLOAT32, (*PROMOTE, *_PROMOTED_BY_TORCH), _SEQUENCES)
    low, wide, promoted, sequences = (
        [name for name in names if hasattr(module, name)] for names in groups
    )
    return low, wide, promoted, sequences
