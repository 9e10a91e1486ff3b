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

/// What the CPU, CUDA and fake implementations of the batch-norm operators have in common.

namespace apex::parallel::detail {

using OptionalTensor = std::optional<at::Tensor>;

/// Where the channels of a tensor lie in memory.
enum class MemoryLayout {
  kPlanes,     // [N, C, *] contiguous
  kRows,       // [N, *, C] contiguous (channel_last), or [N, C]
  kMovedRows,  // [N, C, *] whose memory is [N, *, C]: torch.channels_last and its like
};

/// The layout the operators compute `input` in; any other strides are copied into kPlanes.
MemoryLayout layout_of(const at::Tensor& input, bool channel_last);
at::Tensor to_layout(const at::Tensor& tensor, MemoryLayout layout);

/// Makes a tensor whose values are not set.
using Empty = at::Tensor (*)(c10::SymIntArrayRef sizes, const at::TensorOptions& options,
                             std::optional<at::MemoryFormat> format);
at::Tensor torch_empty(c10::SymIntArrayRef sizes, const at::TensorOptions& options,
                       std::optional<at::MemoryFormat> format);
at::Tensor empty_in_layout(const at::Tensor& like, MemoryLayout layout, Empty empty = &torch_empty);

/// The sizes that kernels see. With `rows` there are batch * plane rows of `channels` values.
struct Sizes {
  bool rows;
  kernels::Planes planes;
  int64_t values_per_channel() const { return planes.batch * planes.plane; }
};
Sizes sizes_of(const at::Tensor& input, MemoryLayout layout);

/// The dimension of `input` that holds the channels.
int64_t channel_dim(const at::Tensor& input, bool channel_last);

/// Refuses, with a ValueError, what the operators cannot honour. Works on fake tensors, too.
void check_forward(const at::Tensor& input, const OptionalTensor& z, const OptionalTensor& weight,
                   const OptionalTensor& bias, const OptionalTensor& running_mean,
                   const OptionalTensor& running_var, const OptionalTensor& num_batches_tracked,
                   bool channel_last);

/// The same for the running statistics of a training batch, which are written.
void check_updated(const OptionalTensor& running_mean, const OptionalTensor& running_var);

/// The same for the backward operator: kernels trust what passes.
void check_backward(const at::Tensor& grad_output, const at::Tensor& input,
                    const OptionalTensor& output, const OptionalTensor& weight,
                    const OptionalTensor& bias, const at::Tensor& mean,
                    const at::Tensor& invstd_or_var, const OptionalTensor& count,
                    bool channel_last);

/// The counter of batches as an int64, which is what kernels count in: a copy where it is of
/// another type. Undefined without one.
at::Tensor counter_as_int64(const OptionalTensor& counter);
/// Writes back what was counted in a copy.
void store_counter(const OptionalTensor& counter, const at::Tensor& counted);

/// Raises torch's own error for a training batch that has one value per channel.
void check_more_than_one_value(const at::Tensor& input, int64_t values_over_all_ranks);

kernels::ChannelParam channel_param(const OptionalTensor& tensor);

/// Of the arguments of the backward operator.
kernels::ChannelStatistics channel_statistics(const at::Tensor& mean,
                                              const at::Tensor& invstd_or_var, bool constant,
                                              double eps);

using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Which gradients the caller wants: input, z, weight, bias.
using OutputMask = std::array<bool, 4>;

/// Calls `f` with a value of the C++ type of `type`.
template <typename F>
void visit_element_type(at::ScalarType type, F&& f) {
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
