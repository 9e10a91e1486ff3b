// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "batch_norm/sync_batch_norm_common.h"

/// C++ calls of the operators through the dispatcher, so that autograd, fake tensors and tracing
/// see them. Their schemas are in sync_batch_norm_ops.cpp.

namespace apex::parallel::detail {

ForwardResult call(const ForwardArguments& a);
at::Tensor call(const InferenceArguments& a);
BackwardResult call(const BackwardArguments& a);
at::Tensor call_all_reduce_sum(const at::Tensor& tensor, c10::string_view group_name,
                               c10::string_view layer);

/// Batch norm with torch's own operators, for transforms of torch.func and forward-mode
/// derivatives. Throws a NotImplementedError in training with several ranks.
ForwardResult forward_transformed(const ForwardArguments& a);
at::Tensor inference_transformed(const InferenceArguments& a);

struct DoubleBackwardResult {
  at::Tensor grad_output;
  at::Tensor input;
  at::Tensor weight;  // undefined without a weight
};

/// The backward of the backward operator. Takes the gradients of a loss by the results of that
/// operator (any may be undefined). Returns the gradients by its arguments. Reads only the first
/// element of `a.needs`: whether the backward computed dx, or the input requires a gradient. Uses
/// differentiable operators, so that the result can be differentiated again if grad mode is on. In
/// training it runs one collective over all ranks, and two more if grad mode is on.
DoubleBackwardResult double_backward(const BackwardArguments& a, const at::Tensor& gg_input,
                                     const at::Tensor& gg_z, const at::Tensor& gg_weight,
                                     const at::Tensor& gg_bias);

}  // namespace apex::parallel::detail
