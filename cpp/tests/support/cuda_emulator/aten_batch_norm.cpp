// SPDX-License-Identifier: BSD-3-Clause
// ATen's operators of synchronized batch norm, which ATen has only for CUDA, for the CPU and thus
// for the fake device, with the shapes, types and special cases of the CUDA versions.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

at::ScalarType computed(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void expect_computed(const Tensor& x, const Tensor& values) {
  TORCH_CHECK(values.scalar_type() == computed(x) && values.is_contiguous());
}

Tensor per_channel(const Tensor& values, const Tensor& x) {
  expect_computed(x, values);
  return x.dim() == 2 ? values : values.unsqueeze(1);
}

Tensor channels_sum(const Tensor& x) {
  return x.dim() == 2 ? x.sum(0) : x.sum(at::IntArrayRef({0, 2}));
}

std::tuple<Tensor, Tensor> stats(const Tensor& x, double eps) {
  TORCH_CHECK(x.numel() > 0);
  const Tensor wide = x.to(at::kDouble);
  const auto count = static_cast<double>(x.numel() / x.size(1));
  const Tensor mean = channels_sum(wide) / count;
  const Tensor centered = wide - (x.dim() == 2 ? mean : mean.unsqueeze(1));
  const Tensor var = channels_sum(centered.square()) / count + eps;
  return {mean.to(computed(x)), var.rsqrt().masked_fill(var == 0, 0).to(computed(x))};
}

std::tuple<Tensor, Tensor> gather_stats(const Tensor& x, const Tensor& mean, const Tensor& invstd,
                                        const Optional& running_mean, const Optional& running_var,
                                        double momentum, double eps, const Tensor& counts) {
  TORCH_CHECK(!running_mean && !running_var && counts.dtype() == x.dtype());
  expect_computed(x, mean);
  expect_computed(x, invstd);
  Tensor all_mean = at::zeros_like(mean[0]), squares = at::zeros_like(mean[0]), n = counts[0] * 0;
  for (int64_t rank = 0; rank < mean.size(0); ++rank) {
    const Tensor share = 1 / (n + counts[rank]);  // no values so far: NaN, as on CUDA
    const Tensor var = invstd[rank].reciprocal().square() - eps;
    squares =
        squares + var * counts[rank] + (all_mean - mean[rank]).square() * n * counts[rank] * share;
    all_mean = n * share * all_mean + counts[rank] * share * mean[rank];
    n = n + counts[rank];
  }
  return {all_mean, (squares / n + eps).rsqrt()};
}

Tensor elements(const Tensor& x, const Optional& weight, const Optional& bias, const Tensor& mean,
                const Tensor& invstd, double) {
  Tensor y = (x.to(computed(x)) - per_channel(mean, x)) * per_channel(invstd, x);
  if (weight) y = y * per_channel(*weight, x);
  if (bias) y = y + per_channel(*bias, x);
  return y.to(x.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& dy, const Tensor& x,
                                                           const Tensor& mean, const Tensor&,
                                                           const Optional&, bool input_g,
                                                           bool weight_g, bool bias_g) {
  TORCH_CHECK(input_g && !weight_g && !bias_g && x.numel() > 0 && dy.dtype() == x.dtype());
  const Tensor wide = dy.to(at::kDouble), centered = x.to(at::kDouble) - per_channel(mean, x);
  return {
      channels_sum(wide).to(computed(x)), channels_sum(wide * centered).to(computed(x)), {}, {}};
}

Tensor backward_elements(const Tensor& dy, const Tensor& x, const Tensor& mean,
                         const Tensor& invstd, const Optional& weight, const Tensor& sum_dy,
                         const Tensor& sum_dy_xmu, const Tensor& count) {
  TORCH_CHECK(count.scalar_type() == at::kInt && dy.dtype() == x.dtype());
  const Tensor n = count.sum(), s = per_channel(invstd, x);
  const Tensor dx =
      dy.to(computed(x)) - per_channel(sum_dy, x) / n -
      (x.to(computed(x)) - per_channel(mean, x)) * s * s * per_channel(sum_dy_xmu, x) / n;
  return (dx * (weight ? s * per_channel(*weight, x) : s)).to(x.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("batch_norm_stats", &stats);
  m.impl("batch_norm_gather_stats_with_counts", &gather_stats);
  m.impl("batch_norm_elemt", &elements);
  m.impl("batch_norm_backward_reduce", &backward_reduce);
  m.impl("batch_norm_backward_elemt", &backward_elements);
}
