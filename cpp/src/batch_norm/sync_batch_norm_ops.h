// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "batch_norm/sync_batch_norm_common.h"

/// The operators as C++ calls that go through the dispatcher (so that autograd, fake tensors and
/// tracing see them). Their schemas are in sync_batch_norm_ops.cpp.

namespace apex::parallel::detail {

ForwardResult call(const ForwardArguments& a);
at::Tensor call(const InferenceArguments& a);
BackwardResult call(const BackwardArguments& a);
at::Tensor call_all_reduce_sum(const at::Tensor& tensor, c10::string_view group_name,
                               c10::string_view layer);

/// The same results by torch's own operators, for transforms of torch.func and forward-mode
/// derivatives. Throws a NotImplementedError where there are other ranks.
ForwardResult forward_transformed(const ForwardArguments& a);
at::Tensor inference_transformed(const InferenceArguments& a);

struct DoubleBackwardResult {
  at::Tensor grad_output;
  at::Tensor input;
  at::Tensor weight;  // undefined without a weight
};

/// Given the gradients of a loss with respect to the results of the backward operator (any may be
/// undefined), those with respect to its arguments. Of `a.needs` only the first counts: whether
/// anything depends on the input. One collective, over all ranks, in training. Made of
/// differentiable operators: with grad mode on, the result can be differentiated again.
DoubleBackwardResult double_backward(const BackwardArguments& a, const at::Tensor& gg_input,
                                     const at::Tensor& gg_z, const at::Tensor& gg_weight,
                                     const at::Tensor& gg_bias);

}  // namespace apex::parallel::detail
