#pragma once

#include "batch_norm/sync_batch_norm_common.h"

/// The operators as C++ calls that go through the dispatcher (so that autograd, fake tensors and
/// tracing see them). Their schemas are in sync_batch_norm_ops.cpp.

namespace apex::parallel::detail {

ForwardResult call_forward(const at::Tensor& input, const OptionalTensor& z,
                           const OptionalTensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& running_mean, const OptionalTensor& running_var,
                           const OptionalTensor& num_batches_tracked,
                           std::optional<double> momentum, double eps, bool channel_last,
                           bool fuse_relu, c10::string_view group_name);

BackwardResult call_backward(const at::Tensor& grad_output, const at::Tensor& input,
                             const OptionalTensor& output, const OptionalTensor& weight,
                             const OptionalTensor& bias, const at::Tensor& mean,
                             const at::Tensor& invstd_or_var, const OptionalTensor& count,
                             double eps, bool channel_last, bool fuse_relu, OutputMask needs,
                             c10::string_view group_name);

at::Tensor call_inference(const at::Tensor& input, const OptionalTensor& z,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
                          bool channel_last, bool fuse_relu);

at::Tensor call_all_reduce_sum(const at::Tensor& tensor, c10::string_view group_name);

/// The same results by torch's own operators, for transforms of torch.func and forward-mode
/// derivatives. Throws a NotImplementedError where there are other ranks.
ForwardResult forward_transformed(const at::Tensor& input, const OptionalTensor& z,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  const OptionalTensor& running_mean,
                                  const OptionalTensor& running_var,
                                  const OptionalTensor& num_batches_tracked,
                                  std::optional<double> momentum, double eps, bool channel_last,
                                  bool fuse_relu, c10::string_view group_name);

at::Tensor inference_transformed(const at::Tensor& input, const OptionalTensor& z,
                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                 const at::Tensor& running_mean, const at::Tensor& running_var,
                                 double eps, bool channel_last, bool fuse_relu);

/// Everything the second derivative needs, as the backward operator was called.
struct BackwardCall {
  at::Tensor grad_output;
  at::Tensor input;
  OptionalTensor output;
  OptionalTensor weight;
  OptionalTensor bias;
  at::Tensor mean;
  at::Tensor invstd_or_var;
  OptionalTensor count;
  double eps;
  bool channel_last;
  bool fuse_relu;
  bool needs_input;
  std::string group_name;
};

struct DoubleBackwardResult {
  at::Tensor grad_output;
  at::Tensor input;
  at::Tensor weight;  // undefined without a weight
};

/// Given the gradients of a loss with respect to the results of the backward operator (any may be
/// undefined), those with respect to its arguments. One collective, over all ranks, in training.
/// Made of differentiable operators: with grad mode on, the result can be differentiated again.
DoubleBackwardResult double_backward(const BackwardCall& call, const at::Tensor& gg_input,
                                     const at::Tensor& gg_z, const at::Tensor& gg_weight,
                                     const at::Tensor& gg_bias);

}  // namespace apex::parallel::detail
