#include "batch_norm/sync_batch_norm_common.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include <sstream>

namespace apex::parallel::detail {

int64_t channel_dim(const at::Tensor& input, bool channel_last) {
  return channel_last ? input.dim() - 1 : 1;
}

namespace {

/// torch's name for "channels last" of that many dimensions, whose strides it knows without
/// looking.
std::optional<at::MemoryFormat> channels_last_format(int64_t dim) {
  if (dim == 4) {
    return at::MemoryFormat::ChannelsLast;
  }
  if (dim == 5) {
    return at::MemoryFormat::ChannelsLast3d;
  }
  return std::nullopt;
}

}  // namespace

MemoryLayout layout_of(const at::Tensor& input, bool channel_last) {
  if (channel_last || input.dim() == 2) {
    return MemoryLayout::kRows;
  }
  if (input.is_contiguous()) {
    return MemoryLayout::kPlanes;
  }
  const auto format = channels_last_format(input.dim());
  const bool moved = format ? input.is_contiguous(*format) : input.movedim(1, -1).is_contiguous();
  return moved ? MemoryLayout::kMovedRows : MemoryLayout::kPlanes;
}

at::Tensor to_layout(const at::Tensor& tensor, MemoryLayout layout) {
  if (layout != MemoryLayout::kMovedRows) {
    return tensor.contiguous();
  }
  if (const auto format = channels_last_format(tensor.dim())) {
    return tensor.contiguous(*format);
  }
  return tensor.movedim(1, -1).contiguous().movedim(-1, 1);
}

at::Tensor torch_empty(c10::SymIntArrayRef sizes, const at::TensorOptions& options,
                       std::optional<at::MemoryFormat> format) {
  return at::empty_symint(sizes, options, format);
}

at::Tensor empty_in_layout(const at::Tensor& like, MemoryLayout layout, Empty empty) {
  if (layout != MemoryLayout::kMovedRows) {
    return empty(like.sym_sizes(), like.options(), std::nullopt);
  }
  if (const auto format = channels_last_format(like.dim())) {
    return empty(like.sym_sizes(), like.options(), format);
  }
  return empty(like.movedim(1, -1).sym_sizes(), like.options(), std::nullopt).movedim(-1, 1);
}

Sizes sizes_of(const at::Tensor& input, MemoryLayout layout) {
  const int64_t dim = layout == MemoryLayout::kRows ? input.dim() - 1 : 1;
  const int64_t channels = input.size(dim);
  int64_t plane = 1;
  for (int64_t d = 1; d < input.dim(); ++d) {
    plane *= d == dim ? 1 : input.size(d);
  }
  // With one value per plane the two layouts are the same memory, and rows are read faster.
  return {layout != MemoryLayout::kPlanes || plane == 1, {input.size(0), channels, plane}};
}

namespace {

/// An argument on `meta` would send the whole call there, and memory that nobody has written would
/// come back.
void check_device(const OptionalTensor& tensor, const at::Tensor& input, const char* name) {
  if (tensor.has_value() && tensor->defined()) {
    TORCH_CHECK_VALUE(tensor->device() == input.device(), "apex sync batch norm: ", name, " is on ",
                      tensor->device(), " and the input on ", input.device(),
                      "; move the module or the input.");
  }
}

bool is_element_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

void check_input(const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "expected at least 2D input (got ", input.dim(),
                    "D input): apex sync batch norm takes [N, C, *], or [N, *, C] with "
                    "channel_last=True.");
  TORCH_CHECK_TYPE(is_element_type(input.scalar_type()), "apex sync batch norm: the input is ",
                   input.scalar_type(), "; it takes float16, bfloat16, float32 and float64.");
}

void check_channels(const OptionalTensor& tensor, const c10::SymInt& channels, const char* name) {
  if (tensor.has_value() && tensor->defined()) {
    TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->sym_size(0) == channels,
                      "apex sync batch norm: ", name, " has shape ", tensor->sym_sizes(),
                      " but the input has ", channels,
                      " channels; pass one value per channel (and check channel_last).");
    TORCH_CHECK_TYPE(is_element_type(tensor->scalar_type()), "apex sync batch norm: ", name, " is ",
                     tensor->scalar_type(), "; it takes float16, bfloat16, float32 and float64.");
  }
}

/// Of what is updated in place: two channels in one place would both be written.
void check_own_memory(const OptionalTensor& tensor, const char* name) {
  if (tensor.has_value() && tensor->defined()) {
    TORCH_CHECK_VALUE(
        at::has_internal_overlap(*tensor) != at::MemOverlap::Yes, "apex sync batch norm: ", name,
        " is expanded, so its channels share memory and cannot be updated; clone() it first.");
  }
}

/// What has an element for each of the input's.
void check_elements(const OptionalTensor& tensor, const at::Tensor& input, bool same_type,
                    const char* name, const char* why) {
  if (tensor.has_value() && tensor->defined()) {
    TORCH_CHECK_VALUE(tensor->sym_sizes() == input.sym_sizes() &&
                          (!same_type || tensor->dtype() == input.dtype()),
                      "apex sync batch norm: ", name, " is ", tensor->dtype(), " ",
                      tensor->sym_sizes(), " and the input ", input.dtype(), " ", input.sym_sizes(),
                      "; ", why);
  }
}

bool is_one_number(const at::Tensor& tensor) {
  return tensor.sym_numel() == 1 && tensor.scalar_type() != at::kBool && !tensor.is_complex();
}

}  // namespace

void check_forward(const at::Tensor& input, const OptionalTensor& z, const OptionalTensor& weight,
                   const OptionalTensor& bias, const OptionalTensor& running_mean,
                   const OptionalTensor& running_var, const OptionalTensor& num_batches_tracked,
                   bool channel_last) {
  check_input(input);
  check_device(z, input, "z");
  check_device(weight, input, "weight");
  check_device(bias, input, "bias");
  check_device(running_mean, input, "running_mean");
  check_device(running_var, input, "running_var");
  check_device(num_batches_tracked, input, "num_batches_tracked");
  if (num_batches_tracked.has_value() && num_batches_tracked->defined()) {
    TORCH_CHECK_VALUE(is_one_number(*num_batches_tracked),
                      "apex sync batch norm: num_batches_tracked is ", num_batches_tracked->dtype(),
                      " ", num_batches_tracked->sym_sizes(),
                      "; it has to be one number, e.g. torch.tensor(0).");
  }
  const c10::SymInt channels = input.sym_size(channel_dim(input, channel_last));
  check_channels(weight, channels, "weight");
  check_channels(bias, channels, "bias");
  check_channels(running_mean, channels, "running_mean");
  check_channels(running_var, channels, "running_var");
  check_elements(z, input, /*same_type=*/true, "z",
                 "z is added element by element and has to be of the same kind.");
}

void check_updated(const OptionalTensor& running_mean, const OptionalTensor& running_var) {
  check_own_memory(running_mean, "running_mean");
  check_own_memory(running_var, "running_var");
}

void check_backward(const at::Tensor& grad_output, const at::Tensor& input,
                    const OptionalTensor& output, const OptionalTensor& weight,
                    const OptionalTensor& bias, const at::Tensor& mean,
                    const at::Tensor& invstd_or_var, const OptionalTensor& count,
                    bool channel_last) {
  check_input(input);
  check_device(grad_output, input, "grad_output");
  check_device(output, input, "output");
  check_device(weight, input, "weight");
  check_device(bias, input, "bias");
  check_device(mean, input, "mean");
  check_device(invstd_or_var, input, "invstd_or_var");
  check_device(count, input, "count");
  TORCH_CHECK_TYPE(is_element_type(grad_output.scalar_type()),
                   "apex sync batch norm: grad_output is ", grad_output.scalar_type(),
                   "; it takes float16, bfloat16, float32 and float64.");
  check_elements(grad_output, input, /*same_type=*/false, "grad_output",
                 "pass a gradient for each element.");
  check_elements(output, input, /*same_type=*/true, "output", "pass what the forward returned.");
  const c10::SymInt channels = input.sym_size(channel_dim(input, channel_last));
  check_channels(weight, channels, "weight");
  check_channels(bias, channels, "bias");
  check_channels(mean, channels, "mean");
  check_channels(invstd_or_var, channels, "invstd_or_var");
  if (count.has_value() && count->defined()) {
    TORCH_CHECK_VALUE(count->sym_numel() == 1 && count->scalar_type() == at::kLong,
                      "apex sync batch norm: count is ", count->dtype(), " ", count->sym_sizes(),
                      "; pass the int64 that the forward returned.");
  }
}

at::Tensor counter_as_int64(const OptionalTensor& counter) {
  return counter.has_value() && counter->defined() ? counter->to(at::kLong) : at::Tensor();
}

void store_counter(const OptionalTensor& counter, const at::Tensor& counted) {
  if (counted.defined() && !counted.is_same(*counter)) {
    counter->copy_(counted.view(counter->sizes()), /*non_blocking=*/true);
  }
}

void check_more_than_one_value(const at::Tensor& input, int64_t values_over_all_ranks) {
  if (values_over_all_ranks == 1) {
    std::ostringstream sizes;
    for (int64_t d = 0; d < input.dim(); ++d) {
      sizes << (d == 0 ? "" : ", ") << input.size(d);
    }
    TORCH_CHECK_VALUE(false,
                      "Expected more than 1 value per channel when training, got input size "
                      "torch.Size([",
                      sizes.str(), "])");
  }
}

kernels::ChannelParam channel_param(const OptionalTensor& tensor) {
  using kernels::ParamType;
  if (!tensor.has_value() || !tensor->defined()) {
    return {};
  }
  const int64_t stride = tensor->stride(0);
  switch (tensor->scalar_type()) {
    case at::kFloat:
      return {tensor->data_ptr(), ParamType::kFloat32, stride};
    case at::kDouble:
      return {tensor->data_ptr(), ParamType::kFloat64, stride};
    case at::kHalf:
      return {tensor->data_ptr(), ParamType::kFloat16, stride};
    case at::kBFloat16:
      return {tensor->data_ptr(), ParamType::kBFloat16, stride};
    default:
      TORCH_CHECK_TYPE(false, "apex sync batch norm: a per-channel tensor is ",
                       tensor->scalar_type(), "; it has to be of a floating type.");
  }
}

kernels::ChannelStatistics channel_statistics(const at::Tensor& mean,
                                              const at::Tensor& invstd_or_var, bool constant,
                                              double eps) {
  return {channel_param(mean), channel_param(invstd_or_var), constant, eps};
}

}  // namespace apex::parallel::detail
