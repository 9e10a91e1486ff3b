// SPDX-License-Identifier: BSD-3-Clause
// Checks of the operators' arguments, and the layouts in which the operators compute.

#include <ATen/MemoryOverlap.h>
#include <c10/util/StringUtil.h>

#include "batch_norm/sync_batch_norm_ops.h"

namespace apex::parallel::detail {
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

void check_type(const at::Tensor& tensor, const char* name) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16,
      "apex sync batch norm: ", name, " is ", type,
      "; it takes float16, bfloat16, float32 and float64.");
}

void check_input(const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "expected at least 2D input (got ", input.dim(),
                    "D input): apex sync batch norm takes [N, C, *], or [N, *, C] with "
                    "channel_last=True.");
  check_type(input, "the input");
}

/// Checks a tensor with one value per channel.
void check_channels(const OptionalTensor& tensor, const at::Tensor& input, const char* name) {
  check_device(tensor, input, name);
  if (present(tensor)) {
    TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->sym_size(0) == input.sym_size(1),
                      "apex sync batch norm: ", name, " has shape ", tensor->sym_sizes(),
                      " but the input has ", input.sym_size(1),
                      " channels; pass one value per channel (and check channel_last).");
    check_type(*tensor, name);
  }
}

/// Checks running statistics, which are updated in place. Channels that share memory would
/// overwrite each other.
void check_updated(const OptionalTensor& tensor, const at::Tensor& input, const char* name) {
  check_channels(tensor, input, name);
  if (present(tensor)) {
    TORCH_CHECK_VALUE(
        at::has_internal_overlap(*tensor) != at::MemOverlap::Yes, "apex sync batch norm: ", name,
        " is expanded, so its channels share memory and cannot be updated; clone() it first.");
  }
}

}  // namespace

void check(const ForwardArguments& a) {
  check_input(a.input);
  TORCH_CHECK_VALUE(a.eps > 0, "batch_norm eps must be positive during training, but got ", a.eps);
  check_channels(a.weight, a.input, "weight");
  check_channels(a.bias, a.input, "bias");
  check_updated(a.running_mean, a.input, "running_mean");
  check_updated(a.running_var, a.input, "running_var");
  const OptionalTensor& batches = a.num_batches_tracked;
  check_device(batches, a.input, "num_batches_tracked");
  if (present(batches)) {
    TORCH_CHECK_VALUE(
        batches->sym_numel() == 1 && batches->scalar_type() != at::kBool && !batches->is_complex(),
        "apex sync batch norm: num_batches_tracked is ", batches->dtype(), " ",
        batches->sym_sizes(), "; it must be a tensor with one number, e.g. torch.tensor(0).");
  }
}

void check(const BackwardArguments& a) {
  check_input(a.input);
  check_device(a.grad_output, a.input, "grad_output");
  check_type(a.grad_output, "grad_output");
  TORCH_CHECK_VALUE(a.grad_output.sym_sizes() == a.input.sym_sizes(),
                    "apex sync batch norm: grad_output is ", a.grad_output.sym_sizes(),
                    " but the input is ", a.input.sym_sizes(),
                    "; pass a gradient for each element.");
  check_channels(a.weight, a.input, "weight");
  check_channels(a.mean, a.input, "mean");
  check_channels(a.invstd, a.input, "invstd");
  check_device(a.count, a.input, "count");
  TORCH_CHECK_VALUE(a.count.sym_numel() == 1 && a.count.scalar_type() == at::kLong,
                    "apex sync batch norm: count is ", a.count.dtype(), " ", a.count.sym_sizes(),
                    "; pass the int64 that the forward returned.");
}

Peers checked_peers(const ForwardArguments& a) {
  Peers peers = find_peers(a.group_name, a.layer);
  try {
    check(a);
  } catch (...) {
    announce_refused(peers, Direction::kForward);
    throw;
  }
  if (!peers && a.input.size(1) > 0) {
    check_more_than_one_value(a.input, a.input.numel() / a.input.size(1));
  }
  return peers;
}

Peers checked_peers(const BackwardArguments& a) {
  check(a);
  return a.needs[0] ? find_peers(a.group_name, a.layer) : Peers();
}

void check_more_than_one_value(const at::Tensor& input, int64_t values_over_all_ranks) {
  TORCH_CHECK_VALUE(values_over_all_ranks != 1,
                    "Expected more than 1 value per channel when training, got input size "
                    "torch.Size([",
                    c10::Join(", ", input.sizes()), "])");
}

at::Tensor in_layout(const at::Tensor& input) {
  return input.is_contiguous() || input.movedim(1, -1).is_contiguous() ? input : input.contiguous();
}

at::Tensor in_layout_of(const at::Tensor& x, const at::Tensor& tensor) {
  return x.is_contiguous() ? tensor.contiguous()
                           : tensor.movedim(1, -1).contiguous().movedim(-1, 1);
}

Sizes::Sizes(const at::Tensor& x) : planes{x.size(0), x.size(1), 1} {
  for (int64_t d = 2; d < x.dim(); ++d) planes.plane *= x.size(d);
  // With one value per plane both layouts have the same order, and the row kernels are faster.
  rows = planes.plane == 1 || !x.is_contiguous();
}

}  // namespace apex::parallel::detail
