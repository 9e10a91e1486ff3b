// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The batch-norm operators: arguments, checks, and calls through the dispatcher, so that autograd,
/// fake tensors and tracing see them. Their schemas are in sync_batch_norm_ops.cpp. They implement
/// training; evaluation is at::batch_norm.

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

#include "batch_norm/exchange.h"
#include "kernels/batch_norm_index.h"

namespace torch::nn {
class Module;
}

namespace apex::parallel::detail {

using OptionalTensor = std::optional<at::Tensor>;

inline bool present(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

/// The arguments of the operators, in the order of their schemas. The members refer to objects of
/// the caller. Inputs are [N, C, *].
struct ForwardArguments {
  const at::Tensor& input;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& running_mean;
  const OptionalTensor& running_var;
  const OptionalTensor& num_batches_tracked;
  std::optional<double> momentum;
  double eps;
  c10::string_view group_name;
  c10::string_view layer = {};
};

/// Which gradients the caller wants: input, weight, bias.
using OutputMask = std::array<bool, 3>;

struct BackwardArguments {
  const at::Tensor& grad_output;
  const at::Tensor& input;
  const OptionalTensor& weight;
  const at::Tensor& mean;
  const at::Tensor& invstd;
  const at::Tensor& count;
  OutputMask needs;
  c10::string_view group_name;
  c10::string_view layer = {};
};

using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Kernels with the signatures of the schemas, for the dispatcher.
template <ForwardResult (*kRun)(const ForwardArguments&)>
ForwardResult forward_kernel(const at::Tensor& input, const OptionalTensor& weight,
                             const OptionalTensor& bias, const OptionalTensor& running_mean,
                             const OptionalTensor& running_var,
                             const OptionalTensor& num_batches_tracked,
                             std::optional<double> momentum, double eps,
                             c10::string_view group_name, c10::string_view layer) {
  return kRun({input, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps,
               group_name, layer});
}

template <BackwardResult (*kRun)(const BackwardArguments&)>
BackwardResult backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                               const OptionalTensor& weight, const at::Tensor& mean,
                               const at::Tensor& invstd, const at::Tensor& count, OutputMask needs,
                               c10::string_view group_name, c10::string_view layer) {
  return kRun({grad_output, input, weight, mean, invstd, count, needs, group_name, layer});
}

/// Call the operators through the dispatcher.
ForwardResult call(const ForwardArguments& a);
BackwardResult call(const BackwardArguments& a);

/// all_reduce_sum() with autograd.
at::Tensor differentiable_sum(const at::Tensor& tensor, c10::string_view group_name,
                              c10::string_view layer);

/// The operators without CUDA kernels, for any device.
ForwardResult forward_composed(const ForwardArguments& a);
BackwardResult backward_composed(const BackwardArguments& a);

/// The backward by differentiable operators. With `eps`, the statistics are functions of the input,
/// which takes two more collectives.
BackwardResult backward_formula(const BackwardArguments& a, std::optional<double> eps);

/// Throws a ValueError or a TypeError for arguments that the operators do not support. The kernels
/// rely on these checks. Also works on fake tensors.
void check(const ForwardArguments& a);
void check(const BackwardArguments& a);

/// The type in which elements of `input` are computed.
inline at::ScalarType computing_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// The options of the gradients of weight and bias: the weight's, or the computing type.
inline at::TensorOptions parameter_options(const BackwardArguments& a) {
  return present(a.weight) ? a.weight->options() : a.input.options().dtype(computing_type(a.input));
}

/// Checks the arguments and returns the ranks to synchronize with. If a check of a forward fails,
/// the other ranks are notified.
Peers checked_peers(const ForwardArguments& a);
Peers checked_peers(const BackwardArguments& a);

/// Throws torch's own error for a training batch that has one value per channel.
void check_more_than_one_value(const at::Tensor& input, int64_t values_over_all_ranks);

/// `input`, or a copy, in one of the two orders in memory that the implementations take: planes
/// ([N, C, *] contiguous) or rows ([N, *, C] contiguous, as in torch.channels_last).
at::Tensor in_layout(const at::Tensor& input);
/// `tensor`, or a copy, in the order of `x`, a result of in_layout() with the same sizes.
at::Tensor in_layout_of(const at::Tensor& x, const at::Tensor& tensor);

/// The sizes of a result of in_layout() as the kernels take them.
struct Sizes {
  explicit Sizes(const at::Tensor& x);
  kernels::Planes planes;
  bool rows;  ///< batch * plane rows of `channels` values
};

}  // namespace apex::parallel::detail

namespace apex::parallel {

/// The name by which operators (torch.ops.apex.*) find `group`. This is the group's own name, which
/// is registered here if c10d does not know it, or another name if c10d has another group of that
/// name. Empty for null.
APEX_API std::string process_group_name(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Sets the layer_name of every SyncBatchNorm in `model`.
void name_layers(torch::nn::Module& model);

}  // namespace apex::parallel
