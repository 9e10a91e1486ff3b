// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "batch_norm/exchange.h"
#include "kernels/batch_norm_cpu.h"
#include "kernels/channel_param.h"

/// Code shared by the CPU, CUDA and fake implementations of the batch-norm operators.

namespace apex::parallel::detail {

using OptionalTensor = std::optional<at::Tensor>;

/// The order of a tensor's dimensions in memory.
enum class MemoryLayout {
  kPlanes,     // [N, C, *] contiguous
  kRows,       // [N, *, C] contiguous (channel_last), or [N, C]
  kMovedRows,  // [N, C, *] whose memory is [N, *, C]: torch.channels_last, channels_last_3d, ...
};

/// The layout in which the operators compute on `input`. Tensors with other strides are copied to
/// kPlanes.
MemoryLayout layout_of(const at::Tensor& input, bool channel_last);
at::Tensor to_layout(const at::Tensor& tensor, MemoryLayout layout);

/// An uninitialized tensor like `like`.
at::Tensor empty_in_layout(const at::Tensor& like, MemoryLayout layout);

/// Sizes as the kernels take them. With `rows` there are batch * plane rows of `channels` values.
struct Sizes {
  bool rows;
  kernels::Planes planes;
  int64_t values_per_channel() const { return planes.batch * planes.plane; }
};
Sizes sizes_of(const at::Tensor& input, MemoryLayout layout);

/// The dimension of `input` that holds the channels.
int64_t channel_dim(const at::Tensor& input, bool channel_last);

inline bool present(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

/// The arguments of the operators, in the order of their schemas. The members refer to objects of
/// the caller.
struct ForwardArguments {
  const at::Tensor& input;
  const OptionalTensor& z;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& running_mean;
  const OptionalTensor& running_var;
  const OptionalTensor& num_batches_tracked;
  std::optional<double> momentum;
  double eps;
  bool channel_last;
  bool fuse_relu;
  c10::string_view group_name;
  c10::string_view layer = {};
};

struct InferenceArguments {
  const at::Tensor& input;
  const OptionalTensor& z;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const at::Tensor& running_mean;
  const at::Tensor& running_var;
  double eps;
  bool channel_last;
  bool fuse_relu;
};

/// Which gradients the caller wants: input, z, weight, bias.
using OutputMask = std::array<bool, 4>;

struct BackwardArguments {
  const at::Tensor& grad_output;
  const at::Tensor& input;
  const OptionalTensor& output;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const at::Tensor& mean;
  const at::Tensor& invstd_or_var;
  const OptionalTensor& count;
  double eps;
  bool channel_last;
  bool fuse_relu;
  OutputMask needs;
  c10::string_view group_name;
  c10::string_view layer = {};
};

using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Kernels with the signatures of the schemas, for the dispatcher.
template <ForwardResult (*kRun)(const ForwardArguments&)>
ForwardResult forward_kernel(const at::Tensor& input, const OptionalTensor& z,
                             const OptionalTensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& running_mean, const OptionalTensor& running_var,
                             const OptionalTensor& num_batches_tracked,
                             std::optional<double> momentum, double eps, bool channel_last,
                             bool fuse_relu, c10::string_view group_name, c10::string_view layer) {
  return kRun({input, z, weight, bias, running_mean, running_var, num_batches_tracked, momentum,
               eps, channel_last, fuse_relu, group_name, layer});
}

template <at::Tensor (*kRun)(const InferenceArguments&)>
at::Tensor inference_kernel(const at::Tensor& input, const OptionalTensor& z,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            const at::Tensor& running_mean, const at::Tensor& running_var,
                            double eps, bool channel_last, bool fuse_relu) {
  return kRun({input, z, weight, bias, running_mean, running_var, eps, channel_last, fuse_relu});
}

template <BackwardResult (*kRun)(const BackwardArguments&)>
BackwardResult backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                               const OptionalTensor& output, const OptionalTensor& weight,
                               const OptionalTensor& bias, const at::Tensor& mean,
                               const at::Tensor& invstd_or_var, const OptionalTensor& count,
                               double eps, bool channel_last, bool fuse_relu, OutputMask needs,
                               c10::string_view group_name, c10::string_view layer) {
  return kRun({grad_output, input, output, weight, bias, mean, invstd_or_var, count, eps,
               channel_last, fuse_relu, needs, group_name, layer});
}

/// Throws a ValueError or a TypeError for arguments that the operators do not support. The kernels
/// rely on these checks. Also works on fake tensors.
void check(const ForwardArguments& a);
void check(const InferenceArguments& a);
void check(const BackwardArguments& a);

/// Allocates uninitialized results. Gradients that `a.needs` does not request are empty.
ForwardResult new_results(const ForwardArguments& a, MemoryLayout layout);
BackwardResult new_results(const BackwardArguments& a, MemoryLayout layout);

/// The checked input of a forward in training, on any device: in one layout, with memory for the
/// results. If a check fails, the other ranks are notified.
struct ForwardCall {
  explicit ForwardCall(const ForwardArguments& a);

  const Peers peers;
  const MemoryLayout layout;
  const at::Tensor x;
  const OptionalTensor z;
  const Sizes sizes;
  const ForwardResult results;
  const at::Tensor output, mean, invstd, count;  ///< the elements of `results`
  /// num_batches_tracked as an int64, which the kernels count in. A copy if it has another dtype,
  /// undefined if the layer has none.
  const at::Tensor counter;
};

struct InferenceCall {
  explicit InferenceCall(const InferenceArguments& a);

  const MemoryLayout layout;
  const at::Tensor x;
  const OptionalTensor z;
  const Sizes sizes;
  const at::Tensor output;
};

struct BackwardCall {
  explicit BackwardCall(const BackwardArguments& a);

  const MemoryLayout layout;
  const at::Tensor x, dy;
  const OptionalTensor y;
  const Sizes sizes;
  const bool training;
  const Peers peers;
  const kernels::ReluMask mask;
  const BackwardResult results;
  const at::Tensor dx, dz;                   ///< elements of `results`
  const kernels::ChannelParam weight, bias;  ///< their gradients; absent if not requested
  const bool reduces;                        ///< sums over a channel are needed
  const bool writes_elements;                ///< dx or dz is needed
};

/// With more ranks than this, moments are summed instead of gathered.
constexpr int64_t kMostGatheredRanks = 64;

/// Gathers each rank's `record` [kernels::statistics_length(channels)] for kernels::merge_ranks().
/// Returns the records of all ranks, concatenated. With more than kMostGatheredRanks ranks, it
/// returns one merged record. Runs one collective. Never blocks the host on CUDA. See Note
/// [Statistics of many ranks].
at::Tensor gather_statistics(const Peers& peers, const at::Tensor& record, int64_t channels);

/// Copies `counted` to `counter`, if it is a copy and not the same tensor.
void store_counter(const OptionalTensor& counter, const at::Tensor& counted);

/// Throws torch's own error for a training batch that has one value per channel.
void check_more_than_one_value(const at::Tensor& input, int64_t values_over_all_ranks);

kernels::ChannelParam channel_param(const OptionalTensor& tensor);

/// The statistics in the arguments of the backward operator, as the kernels take them.
kernels::ChannelStatistics channel_statistics(const at::Tensor& mean,
                                              const at::Tensor& invstd_or_var, bool constant,
                                              double eps);

/// Calls `f` with a value of the C++ type of `type`, and returns its result.
template <typename F>
auto visit_element_type(at::ScalarType type, F&& f) {
  switch (type) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    case at::kHalf:
      return f(at::Half{});
    case at::kBFloat16:
      return f(at::BFloat16{});
    default:
      TORCH_CHECK_TYPE(false, "apex sync batch norm: the input is ", type,
                       "; it takes float16, bfloat16, float32 and float64.");
  }
}

}  // namespace apex::parallel::detail
