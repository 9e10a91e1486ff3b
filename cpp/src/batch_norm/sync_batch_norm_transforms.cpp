// Batch norm under torch.func's transforms (vmap, grad, jvp, ...) and in forward-mode
// differentiation: written with torch's own operators, which have the rules for these. Slower than
// the kernels, and on one rank alone.

#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <torch/library.h>

#include <algorithm>

#include "batch_norm/sync_batch_norm_ops.h"

namespace apex::parallel::detail {
namespace {

at::Tensor add_and_relu(const at::Tensor& normalized, const OptionalTensor& z, bool channel_last,
                        bool fuse_relu) {
  at::Tensor y = channel_last ? normalized.movedim(1, -1) : normalized;
  if (z.has_value() && z->defined()) {
    y = y + *z;
  }
  return fuse_relu ? y.relu() : y;
}

at::Tensor channels_first(const at::Tensor& input, bool channel_last) {
  return channel_last ? input.movedim(-1, 1) : input;
}

}  // namespace

ForwardResult forward_transformed(const at::Tensor& input, const OptionalTensor& z,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  const OptionalTensor& running_mean,
                                  const OptionalTensor& running_var,
                                  const OptionalTensor& num_batches_tracked,
                                  std::optional<double> momentum, double eps, bool channel_last,
                                  bool fuse_relu, c10::string_view group_name) {
  check_forward(input, z, weight, bias, running_mean, running_var, num_batches_tracked,
                channel_last);
  TORCH_CHECK_NOT_IMPLEMENTED(!find_peers(group_name),
                              "apex sync batch norm: transforms of torch.func and forward-mode "
                              "derivatives are not supported in training with several ranks. "
                              "backward() and torch.autograd.grad are, with derivatives of any "
                              "order; or call the module in evaluation, or with a process group "
                              "of this rank alone.");
  const int64_t count =
      input.numel() / std::max<int64_t>(1, input.size(channel_dim(input, channel_last)));
  check_more_than_one_value(input, count);
  double factor = momentum.value_or(0.0);
  if (num_batches_tracked.has_value() && num_batches_tracked->defined()) {
    num_batches_tracked->add_(1);
    if (!momentum.has_value()) {
      factor = 1.0 / num_batches_tracked->item<double>();
    }
  }
  const auto [y, mean, invstd] =
      at::native_batch_norm(channels_first(input, channel_last), weight, bias, running_mean,
                            running_var, /*training=*/true, factor, eps);
  return {add_and_relu(y, z, channel_last, fuse_relu), mean.detach().to(at::kDouble),
          invstd.detach().to(at::kDouble), at::full({1}, count, input.options().dtype(at::kLong))};
}

at::Tensor inference_transformed(const at::Tensor& input, const OptionalTensor& z,
                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                 const at::Tensor& running_mean, const at::Tensor& running_var,
                                 double eps, bool channel_last, bool fuse_relu) {
  check_forward(input, z, weight, bias, running_mean, running_var, std::nullopt, channel_last);
  const at::Tensor y =
      std::get<0>(at::native_batch_norm(channels_first(input, channel_last), weight, bias,
                                        running_mean, running_var, /*training=*/false,
                                        /*momentum=*/0.0, eps));
  return add_and_relu(y, z, channel_last, fuse_relu);
}

}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, FuncTorchBatched, m) {
  m.impl("sync_batch_norm", &apex::parallel::detail::forward_transformed);
  m.impl("batch_norm_inference", &apex::parallel::detail::inference_transformed);
}
