// SPDX-License-Identifier: BSD-3-Clause
// Batch norm under torch.func's transforms (vmap, grad, jvp, ...) and in forward-mode
// differentiation. It uses torch's own operators, which have the rules for these. It is slower than
// the kernels and supports training on one rank only.

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
  if (present(z)) y = y + *z;
  return fuse_relu ? y.relu() : y;
}

at::Tensor channels_first(const at::Tensor& input, bool channel_last) {
  return channel_last ? input.movedim(-1, 1) : input;
}

}  // namespace

ForwardResult forward_transformed(const ForwardArguments& a) {
  check(a);
  TORCH_CHECK_NOT_IMPLEMENTED(!find_peers(a.group_name, a.layer),
                              "apex sync batch norm: transforms of torch.func and forward-mode "
                              "derivatives are not supported in training with several ranks. Use "
                              "backward() or torch.autograd.grad, which support derivatives of any "
                              "order, call the module in eval(), or use a process group of this "
                              "rank only.");
  const int64_t channels = a.input.size(channel_dim(a.input, a.channel_last));
  const int64_t count = a.input.numel() / std::max<int64_t>(1, channels);
  check_more_than_one_value(a.input, count);
  double factor = a.momentum.value_or(0.0);
  if (present(a.num_batches_tracked)) {
    a.num_batches_tracked->add_(1);
    if (!a.momentum.has_value()) {
      factor = 1.0 / a.num_batches_tracked->item<double>();
    }
  }
  const auto [y, mean, invstd] = at::native_batch_norm(
      channels_first(a.input, a.channel_last), a.weight, a.bias, a.running_mean, a.running_var,
      /*training=*/true, factor, a.eps);
  return {add_and_relu(y, a.z, a.channel_last, a.fuse_relu), mean.detach().to(at::kDouble),
          invstd.detach().to(at::kDouble),
          at::full({1}, count, a.input.options().dtype(at::kLong))};
}

at::Tensor inference_transformed(const InferenceArguments& a) {
  check(a);
  const at::Tensor y = std::get<0>(at::native_batch_norm(
      channels_first(a.input, a.channel_last), a.weight, a.bias, a.running_mean, a.running_var,
      /*training=*/false, /*momentum=*/0.0, a.eps));
  return add_and_relu(y, a.z, a.channel_last, a.fuse_relu);
}

}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, FuncTorchBatched, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_transformed>);
  m.impl("batch_norm_inference", &inference_kernel<&inference_transformed>);
}
