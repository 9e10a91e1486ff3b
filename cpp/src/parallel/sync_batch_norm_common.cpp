#include "sync_batch_norm_common.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <sstream>

#include "comm/collectives.h"

namespace apex::parallel::detail {

int64_t channel_dim(const at::Tensor& input, bool channel_last) {
  return channel_last ? input.dim() - 1 : 1;
}

namespace {

/// torch's name for "channels last" of that many dimensions, whose strides it knows without looking.
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
  const bool moved =
      format ? input.is_contiguous(*format) : input.movedim(1, -1).is_contiguous();
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

/// An argument on `meta` would send the whole call there, and memory that nobody has written would come back.
void check_device(const OptionalTensor& tensor, const at::Tensor& input, const char* name) {
  if (tensor.has_value() && tensor->defined()) {
    TORCH_CHECK_VALUE(tensor->device() == input.device(), "apex sync batch norm: ", name, " is on ", tensor->device(),
                      " and the input on ", input.device(), "; move the module or the input.");
  }
}

void check_channels(const OptionalTensor& tensor, const c10::SymInt& channels, const char* name) {
  if (tensor.has_value() && tensor->defined()) {
    TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->sym_size(0) == channels,
                      "apex sync batch norm: ", name, " has shape ", tensor->sym_sizes(),
                      " but the input has ", channels,
                      " channels; pass one value per channel (and check channel_last).");
  }
}

}  // namespace

void check_forward(const at::Tensor& input, const OptionalTensor& z, const OptionalTensor& weight,
                   const OptionalTensor& bias, const OptionalTensor& running_mean,
                   const OptionalTensor& running_var, const OptionalTensor& num_batches_tracked,
                   bool channel_last) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "expected at least 2D input (got ", input.dim(),
                    "D input): apex sync batch norm takes [N, C, *], or [N, *, C] with "
                    "channel_last=True.");
  check_device(z, input, "z");
  check_device(weight, input, "weight");
  check_device(bias, input, "bias");
  check_device(running_mean, input, "running_mean");
  check_device(running_var, input, "running_var");
  check_device(num_batches_tracked, input, "num_batches_tracked");
  if (num_batches_tracked.has_value() && num_batches_tracked->defined()) {
    TORCH_CHECK_VALUE(num_batches_tracked->sym_numel() == 1 && num_batches_tracked->scalar_type() == at::kLong,
                      "apex sync batch norm: num_batches_tracked is ", num_batches_tracked->dtype(), " ",
                      num_batches_tracked->sym_sizes(), "; it has to be one int64.");
  }
  const c10::SymInt channels = input.sym_size(channel_dim(input, channel_last));
  check_channels(weight, channels, "weight");
  check_channels(bias, channels, "bias");
  check_channels(running_mean, channels, "running_mean");
  check_channels(running_var, channels, "running_var");
  if (z.has_value() && z->defined()) {
    TORCH_CHECK_VALUE(z->sym_sizes() == input.sym_sizes() && z->dtype() == input.dtype(),
                      "apex sync batch norm: z is ", z->dtype(), " ", z->sym_sizes(),
                      " and the input ", input.dtype(), " ", input.sym_sizes(),
                      "; z is added element by element and has to be of the same kind.");
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
  TORCH_CHECK_VALUE(tensor->is_contiguous(),
                    "apex sync batch norm: per-channel tensors have to be contiguous.");
  switch (tensor->scalar_type()) {
    case at::kFloat:
      return {tensor->data_ptr(), ParamType::kFloat32};
    case at::kDouble:
      return {tensor->data_ptr(), ParamType::kFloat64};
    case at::kHalf:
      return {tensor->data_ptr(), ParamType::kFloat16};
    case at::kBFloat16:
      return {tensor->data_ptr(), ParamType::kBFloat16};
    default:
      TORCH_CHECK_TYPE(false, "apex sync batch norm: a per-channel tensor is ",
                       tensor->scalar_type(), "; it has to be of a floating type.");
  }
}

kernels::ChannelStatistics channel_statistics(const at::Tensor& mean, const at::Tensor& invstd_or_var,
                                              bool constant, double eps) {
  return {channel_param(mean), channel_param(invstd_or_var), constant, eps};
}

c10::intrusive_ptr<c10d::ProcessGroup> find_group(c10::string_view name) {
  if (name.empty()) {
    return {};
  }
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(std::string(name));
  } catch (const std::exception&) {
    TORCH_CHECK(false, "apex sync batch norm: no process group is registered as '",
                std::string(name),
                "'; it was destroyed, or never made on this rank. Create it on every rank, and "
                "pass its group_name.");
  }
  return group->getSize() > 1 ? group : c10::intrusive_ptr<c10d::ProcessGroup>();
}

std::string exchange_of(const char* direction, int64_t channels) {
  return std::string("exchange in ") + direction + " of a SyncBatchNorm of " + std::to_string(channels) + " channels";
}

at::Tensor all_gather(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Tensor local,
                      const std::string& what) {
  at::Tensor gathered = at::empty({group->getSize() * local.numel()}, local.options());
  c10d::AllgatherOptions options;
  options.asyncOp = false;  // NCCL: on the current stream, without an event in between
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // its new name is not in torch 2.11
  const auto work = call_collective(what, *group, [&] { return group->_allgather_base(gathered, local, options); });
#pragma GCC diagnostic pop
  if (work) {
    wait_collective(work, what, *group);
  }
  return gathered;
}

void all_reduce(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Tensor& tensor, const std::string& what) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  const auto work = call_collective(what, *group, [&] { return group->allreduce(tensors, options); });
  if (work) {
    wait_collective(work, what, *group);
  }
}

at::Tensor all_reduce_sum(const at::Tensor& tensor, c10::string_view group_name) {
  at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
  if (const auto group = find_group(group_name)) {
    all_reduce(group, sum, "all-reduce in SyncBatchNorm's second derivative");
  }
  return sum;
}

}  // namespace apex::parallel::detail
