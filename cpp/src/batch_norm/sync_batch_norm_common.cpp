// SPDX-License-Identifier: BSD-3-Clause
#include "batch_norm/sync_batch_norm_common.h"

#include <array>

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "floating_point_mode.h"
#include "plain_text.h"

namespace apex::parallel::detail {

int64_t channel_dim(const at::Tensor& input, bool channel_last) {
  return channel_last ? input.dim() - 1 : 1;
}

namespace {

/// torch's channels-last memory format for `dim` dimensions, if it has one. A tensor caches whether
/// it is contiguous in these formats.
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

at::Tensor empty_in_layout(const at::Tensor& like, MemoryLayout layout) {
  const auto& options = like.options();
  if (layout != MemoryLayout::kMovedRows) {
    return at::empty_symint(like.sym_sizes(), options);
  }
  if (const auto format = channels_last_format(like.dim())) {
    return at::empty_symint(like.sym_sizes(), options, format);
  }
  return at::empty_symint(like.movedim(1, -1).sym_sizes(), options).movedim(-1, 1);
}

Sizes sizes_of(const at::Tensor& input, MemoryLayout layout) {
  const int64_t dim = layout == MemoryLayout::kRows ? input.dim() - 1 : 1;
  const int64_t channels = input.size(dim);
  int64_t plane = 1;
  for (int64_t d = 1; d < input.dim(); ++d) {
    plane *= d == dim ? 1 : input.size(d);
  }
  // With one value per plane both layouts have the same memory order, and the row kernels are
  // faster.
  return {layout != MemoryLayout::kPlanes || plane == 1, {input.size(0), channels, plane}};
}

namespace {

/// An argument on `meta` would dispatch the whole call to the Meta kernel, which returns
/// uninitialized memory.
void check_device(const OptionalTensor& tensor, const at::Tensor& input, const char* name) {
  if (present(tensor)) {
    TORCH_CHECK_VALUE(tensor->device() == input.device(), "apex sync batch norm: ", name, " is on ",
                      tensor->device(), " but the input on ", input.device(),
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
  if (present(tensor)) {
    TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->sym_size(0) == channels,
                      "apex sync batch norm: ", name, " has shape ", tensor->sym_sizes(),
                      " but the input has ", channels,
                      " channels; pass one value per channel (and check channel_last).");
    TORCH_CHECK_TYPE(is_element_type(tensor->scalar_type()), "apex sync batch norm: ", name, " is ",
                     tensor->scalar_type(), "; it takes float16, bfloat16, float32 and float64.");
  }
}

/// Checks a tensor that is updated in place. Channels that share memory would overwrite each other.
void check_own_memory(const OptionalTensor& tensor, const char* name) {
  if (present(tensor)) {
    TORCH_CHECK_VALUE(
        at::has_internal_overlap(*tensor) != at::MemOverlap::Yes, "apex sync batch norm: ", name,
        " is expanded, so its channels share memory and cannot be updated; clone() it first.");
  }
}

/// Checks a tensor that must have the shape of the input.
void check_elements(const OptionalTensor& tensor, const at::Tensor& input, bool same_type,
                    const char* name, const char* why) {
  if (present(tensor)) {
    TORCH_CHECK_VALUE(tensor->sym_sizes() == input.sym_sizes() &&
                          (!same_type || tensor->dtype() == input.dtype()),
                      "apex sync batch norm: ", name, " is ", tensor->dtype(), " ",
                      tensor->sym_sizes(), " but the input is ", input.dtype(), " ",
                      input.sym_sizes(), "; ", why);
  }
}

bool is_one_number(const at::Tensor& tensor) {
  return tensor.sym_numel() == 1 && tensor.scalar_type() != at::kBool && !tensor.is_complex();
}

/// Checks what a forward and an inference have in common.
template <typename Arguments>
void check_arguments(const Arguments& a) {
  check_input(a.input);
  check_device(a.z, a.input, "z");
  check_device(a.weight, a.input, "weight");
  check_device(a.bias, a.input, "bias");
  check_device(a.running_mean, a.input, "running_mean");
  check_device(a.running_var, a.input, "running_var");
  const c10::SymInt channels = a.input.sym_size(channel_dim(a.input, a.channel_last));
  check_channels(a.weight, channels, "weight");
  check_channels(a.bias, channels, "bias");
  check_channels(a.running_mean, channels, "running_mean");
  check_channels(a.running_var, channels, "running_var");
  check_elements(a.z, a.input, /*same_type=*/true, "z",
                 "z is added to the output, so its dtype and shape must be those of the input.");
}

OptionalTensor optional_to_layout(const OptionalTensor& tensor, MemoryLayout layout) {
  return present(tensor) ? OptionalTensor(to_layout(*tensor, layout)) : std::nullopt;
}

}  // namespace

void check(const ForwardArguments& a) {
  const OptionalTensor& batches = a.num_batches_tracked;
  check_arguments(a);
  check_device(batches, a.input, "num_batches_tracked");
  if (present(batches)) {
    TORCH_CHECK_VALUE(is_one_number(*batches), "apex sync batch norm: num_batches_tracked is ",
                      batches->dtype(), " ", batches->sym_sizes(),
                      "; it must be a tensor with one number, e.g. torch.tensor(0).");
  }
  check_own_memory(a.running_mean, "running_mean");
  check_own_memory(a.running_var, "running_var");
}

void check(const InferenceArguments& a) { check_arguments(a); }

void check(const BackwardArguments& a) {
  const at::Tensor& input = a.input;
  check_input(input);
  check_device(a.grad_output, input, "grad_output");
  check_device(a.output, input, "output");
  check_device(a.weight, input, "weight");
  check_device(a.bias, input, "bias");
  check_device(a.mean, input, "mean");
  check_device(a.invstd_or_var, input, "invstd_or_var");
  check_device(a.count, input, "count");
  TORCH_CHECK_TYPE(is_element_type(a.grad_output.scalar_type()),
                   "apex sync batch norm: grad_output is ", a.grad_output.scalar_type(),
                   "; it takes float16, bfloat16, float32 and float64.");
  check_elements(a.grad_output, input, /*same_type=*/false, "grad_output",
                 "pass a gradient for each element.");
  check_elements(a.output, input, /*same_type=*/true, "output", "pass what the forward returned.");
  const c10::SymInt channels = input.sym_size(channel_dim(input, a.channel_last));
  check_channels(a.weight, channels, "weight");
  check_channels(a.bias, channels, "bias");
  check_channels(a.mean, channels, "mean");
  check_channels(a.invstd_or_var, channels, "invstd_or_var");
  if (present(a.count)) {
    TORCH_CHECK_VALUE(a.count->sym_numel() == 1 && a.count->scalar_type() == at::kLong,
                      "apex sync batch norm: count is ", a.count->dtype(), " ",
                      a.count->sym_sizes(), "; pass the int64 that the forward returned.");
  }
}

ForwardResult new_results(const ForwardArguments& a, MemoryLayout layout) {
  const c10::SymInt channels = a.input.sym_size(channel_dim(a.input, a.channel_last));
  const auto float64 = a.input.options().dtype(at::kDouble);
  return {empty_in_layout(a.input, layout), at::empty_symint({channels}, float64),
          at::empty_symint({channels}, float64),
          at::empty({1}, a.input.options().dtype(at::kLong))};
}

BackwardResult new_results(const BackwardArguments& a, MemoryLayout layout) {
  const c10::SymInt channels = a.input.sym_size(channel_dim(a.input, a.channel_last));
  const auto none = [&] { return at::empty({0}, a.input.options()); };
  const auto elements = [&](bool needed) {
    return needed ? empty_in_layout(a.input, layout) : none();
  };
  const auto parameter = [&](bool needed, const OptionalTensor& p) {
    return needed && present(p) ? at::empty_symint({channels}, p->options()) : none();
  };
  return {elements(a.needs[0]), elements(a.needs[1] && a.fuse_relu),
          parameter(a.needs[2], a.weight), parameter(a.needs[3], a.bias)};
}

namespace {

Peers checked(const ForwardArguments& a) {
  Peers peers = find_peers(a.group_name, a.layer);
  const BeforeExchange checking(peers, Direction::kForward);
  check(a);
  return peers;
}

kernels::ReluMask mask_of(const BackwardArguments& a) {
  if (!a.fuse_relu) return kernels::ReluMask::kNone;
  return present(a.output) ? kernels::ReluMask::kOutput : kernels::ReluMask::kRecompute;
}

kernels::ChannelParam param_or_none(const at::Tensor& gradient) {
  return gradient.numel() > 0 ? channel_param(gradient) : kernels::ChannelParam{};
}

}  // namespace

ForwardCall::ForwardCall(const ForwardArguments& a)
    : peers(checked(a)),
      layout(layout_of(a.input, a.channel_last)),
      x(to_layout(a.input, layout)),
      z(optional_to_layout(a.z, layout)),
      sizes(sizes_of(x, layout)),
      results(new_results(a, layout)),
      output(std::get<0>(results)),
      mean(std::get<1>(results)),
      invstd(std::get<2>(results)),
      count(std::get<3>(results)),
      counter(present(a.num_batches_tracked) ? a.num_batches_tracked->to(at::kLong)
                                             : at::Tensor()) {
  if (!peers) check_more_than_one_value(a.input, sizes.values_per_channel());
}

InferenceCall::InferenceCall(const InferenceArguments& a)
    : layout((check(a), layout_of(a.input, a.channel_last))),
      x(to_layout(a.input, layout)),
      z(optional_to_layout(a.z, layout)),
      sizes(sizes_of(x, layout)),
      output(empty_in_layout(x, layout)) {}

BackwardCall::BackwardCall(const BackwardArguments& a)
    : layout((check(a), layout_of(a.input, a.channel_last))),
      x(to_layout(a.input, layout)),
      dy(to_layout(a.grad_output.to(a.input.scalar_type()), layout)),
      y(optional_to_layout(a.output, layout)),
      sizes(sizes_of(x, layout)),
      training(present(a.count)),
      peers(training && a.needs[0] ? find_peers(a.group_name, a.layer) : Peers()),
      mask(mask_of(a)),
      results(new_results(a, layout)),
      dx(std::get<0>(results)),
      dz(std::get<1>(results)),
      weight(param_or_none(std::get<2>(results))),
      bias(param_or_none(std::get<3>(results))),
      reduces((training && a.needs[0]) || weight.present() || bias.present()),
      writes_elements(a.needs[0] || dz.numel() > 0) {}

// Note [Statistics of many ranks]
//
// An all-gather of the statistics of a layer gives every rank 2 C + 1 numbers from each rank. In a
// forward of ResNet-50 on 1,000 ranks that is 425 MB. So large groups sum their moments instead: n,
// n mean and m2 + n mean^2. Each rank computes mean and m2 from these sums. The subtraction for m2
// loses digits if the mean is large compared to the standard deviation: the error of the variance
// is mean^2 / 2^52. For a mean of 10^4 standard deviations the relative error is 2e-8, and float32
// inputs have lost four of their seven digits at that mean. For float64 inputs with a mean of 10^7
// standard deviations it is a few percent. Moments about a shift, such as the
// running mean, would keep more digits. But the shift must have the same bits on all ranks, and
// running means may differ or be absent.

at::Tensor gather_statistics(const Peers& peers, const at::Tensor& record, int64_t channels) {
  if (peers.group->getSize() <= kMostGatheredRanks)
    return all_gather(peers, record, Direction::kForward, channels);
  const auto parts = [&](const at::Tensor& of) {
    return std::array<at::Tensor, 3>{of.narrow(0, 0, channels), of.narrow(0, channels, channels),
                                     of.narrow(0, 2 * channels, 1)};
  };
  const auto [mean, m2, count] = parts(record);
  const at::Tensor weighted = mean * count;
  at::Tensor moments = at::cat({weighted, at::addcmul(m2, weighted, mean), count});
  all_reduce(peers, moments, Direction::kForward, channels);
  const DefaultFloatingPointMode mode;  // every rank computes the rest itself
  const auto [sum, squares, total] = parts(moments);
  const at::Tensor mean_of_all = sum / total.clamp_min(1);
  const at::Tensor m2_of_all = at::addcmul(squares, sum, mean_of_all, /*value=*/-1).clamp_min_(0);
  return at::cat({mean_of_all, m2_of_all, total});
}

void store_counter(const OptionalTensor& counter, const at::Tensor& counted) {
  if (counted.defined() && !counted.is_same(*counter)) {
    counter->copy_(counted.view(counter->sizes()), /*non_blocking=*/true);
  }
}

void check_more_than_one_value(const at::Tensor& input, int64_t values_over_all_ranks) {
  if (values_over_all_ranks == 1) {
    PlainText sizes;
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
  if (!present(tensor)) {
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
                       tensor->scalar_type(), "; it must have a floating-point dtype.");
  }
}

kernels::ChannelStatistics channel_statistics(const at::Tensor& mean,
                                              const at::Tensor& invstd_or_var, bool constant,
                                              double eps) {
  return {channel_param(mean), channel_param(invstd_or_var), constant, eps};
}

}  // namespace apex::parallel::detail
