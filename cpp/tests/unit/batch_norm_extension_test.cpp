// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <apex/parallel/sync_batch_norm.h>

#include "batch_norm/sync_batch_norm_common.h"

// Batch norm for another device, as in docs/extending.md. It is written with torch's operators, so
// that the test can call it on the CPU.

namespace apex::parallel::detail {
namespace {

ForwardResult forward_xpu(const ForwardArguments& a) {
  const ForwardCall call(a);
  const int64_t dim = channel_dim(a.input, a.channel_last);
  const int64_t channels = a.input.size(dim);
  const at::Tensor x = a.input.to(at::kDouble).movedim(dim, 0).reshape({channels, -1});
  const at::Tensor mean = x.mean(1);
  const at::Tensor squares = (x - mean.unsqueeze(1)).square().sum(1);
  const at::Tensor record = at::cat({mean, squares, at::full({1}, x.size(1), mean.options())});

  at::Tensor records = record;
  if (call.peers) records = all_gather(call.peers, record, Direction::kForward, channels);
  records = records.view({-1, 2 * channels + 1});
  const at::Tensor means = records.narrow(1, 0, channels);
  const at::Tensor counts = records.narrow(1, 2 * channels, 1);
  const at::Tensor count = counts.sum();
  const at::Tensor total_mean = (means * counts).sum(0) / count;
  const at::Tensor deviations = counts * (means - total_mean).square();
  const at::Tensor var = (records.narrow(1, channels, channels) + deviations).sum(0) / count;

  call.mean.copy_(total_mean);
  call.invstd.copy_((var + a.eps).rsqrt());
  call.count.copy_(count.view({1}));
  const at::Tensor y = (x - total_mean.unsqueeze(1)) * call.invstd.unsqueeze(1);
  std::vector<int64_t> shape = a.input.movedim(dim, 0).sizes().vec();
  call.output.copy_(y.view(shape).movedim(0, dim));
  return call.results;
}

}  // namespace
}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, XPU, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_xpu>);
}

namespace apex::parallel {
namespace {

TEST(BatchNormExtension, OfTorchsOperators_GivesWhatTheCpuGives) {
  for (const bool channel_last : {false, true}) {
    const at::Tensor x = at::randn({4, 3, 5, 2}, at::TensorOptions().dtype(at::kDouble));
    SyncBatchNormArguments arguments;
    arguments.channel_last = channel_last;
    const std::optional<at::Tensor> none;
    const at::Tensor y =
        std::get<0>(detail::forward_xpu({x, none, none, none, none, none, none, arguments.momentum,
                                         arguments.eps, channel_last, /*fuse_relu=*/false, ""}));
    EXPECT_TRUE(at::allclose(y, sync_batch_norm(x, arguments), 1e-12, 1e-12));
  }
}

TEST(BatchNormExtension, ArgumentsTheOperatorsRefuse_AreRefusedBeforeItComputes) {
  const at::Tensor x = at::randn({4, 3});
  const std::optional<at::Tensor> none, weight = at::ones({2});
  EXPECT_THROW(
      detail::forward_xpu({x, none, weight, none, none, none, none, 0.1, 1e-5, false, false, ""}),
      c10::ValueError);
}

}  // namespace
}  // namespace apex::parallel
