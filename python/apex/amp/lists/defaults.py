# SPDX-License-Identifier: BSD-3-Clause
"""The functions that level O1 runs in each dtype, unless a script changes the lists."""

from __future__ import annotations

#: Run in the low-precision dtype: matrix products and convolutions, which tensor cores accelerate.
LOW_PRECISION = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "conv_tbc", "linear", "prelu", "addmm", "addmv", "addr", "addbmm", "baddbmm", "bmm", "matmul",
    "mm", "mv", "__matmul__", "__rmatmul__",
)  # fmt: skip

#: The recurrent kernels of nn.RNN, nn.LSTM, nn.GRU and their cells, in ``torch._VF``.
LOW_PRECISION_RECURRENT = (
    "rnn_tanh", "rnn_relu", "lstm", "gru",
    "rnn_tanh_cell", "rnn_relu_cell", "lstm_cell", "gru_cell",
)  # fmt: skip

#: Run in float32: functions with large ranges, sums over many elements, losses.
FLOAT32 = (
    # normalizations and activations
    "softmax", "log_softmax", "softmin", "softplus", "gelu", "layer_norm", "group_norm",
    "local_response_norm", "normalize", "cosine_similarity",
    # resampling
    "interpolate", "grid_sample",
    # losses
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "ctc_loss",
    "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
    # pointwise
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal",
    "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__",
    # reductions
    "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm",
)  # fmt: skip

#: Run in float32 if they reduce a whole tensor to one number, as a loss does. Along dimensions,
#: they run in the dtype of their input, as in Apex. (A float16 loss overflows at the first scale,
#: 2^16: its gradient, which is the scale, exceeds 65504. Other losses are float32 by the list
#: above.)
FLOAT32_TO_ONE_NUMBER = ("mean",)

#: Run in float32, but only as methods of Tensor.
FLOAT32_METHODS = ("cpu",)

#: Promote their arguments to the widest dtype among them, where torch itself would raise. They run
#: in that dtype; autocast does not cast the matrix products inside.
PROMOTE = ("bilinear", "cross", "dot", "inner", "vdot")

#: In-place methods whose arguments are cast to the dtype of the tensor that they write to.
CAST_TO_SELF = (
    "addmm_",
    "addmv_",
    "addr_",
    "addbmm_",
    "baddbmm_",
    "addcmul_",
    "addcdiv_",
    "atan2_",
    "index_copy_",  # used by nn.AdaptiveLogSoftmaxWithLoss
)

#: Losses that overflow on low-precision inputs, with the remedy.
BANNED = {
    "binary_cross_entropy": "use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) on the "
    "values before the sigmoid, which is safe, or cast the inputs with .float(), or pass "
    "allow_banned=True to amp.init",
}


#: Functions that Apex lists as promoting, and that torch itself promotes.
PROMOTED_BY_TORCH = (
    "addcdiv", "addcmul", "atan2", "add", "div", "mul", "eq", "equal", "ge", "gt", "le", "lt", "ne",
    "__add__", "__div__", "__eq__", "__ge__", "__gt__", "__iadd__", "__idiv__", "__imul__",
    "__isub__", "__itruediv__", "__le__", "__lt__", "__mul__", "__ne__", "__radd__", "__rdiv__",
    "__rmul__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__",
)  # fmt: skip

#: The same for functions that take a sequence.
SEQUENCES_PROMOTED_BY_TORCH = ("cat", "stack")


def existing(names: tuple[str, ...], namespace: object) -> list[str]:
    """A new list of the `names` that exist in `namespace`."""
    return [name for name in names if hasattr(namespace, name)]
