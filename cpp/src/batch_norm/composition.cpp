// SPDX-License-Identifier: BSD-3-Clause
// The operators from ATen's batch norm, for any device that has it. They exchange the same messages
// as the CUDA kernels. Elements are computed as in torch's batch norm, channels in float64. The
// host merges the statistics of the ranks, so a forward waits for the device.

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "batch_norm/sync_batch_norm_ops.h"
#include "kernels/batch_norm_math.h"

namespace apex::parallel::detail {
namespace {

/// Views of tensors in one layout as ATen processes them fastest: planes as [N, C, S], rows as
/// [1, C, R, 1] in channels-last memory.
class Flat {
 public:
  explicit Flat(const at::Tensor& x) : x_(x), sizes_(x) {}

  at::Tensor operator()(const at::Tensor& tensor) const {
    const auto& [batch, channels, plane] = sizes_.planes;
    if (!sizes_.rows) return tensor.view({batch, channels, plane});
    return tensor.movedim(1, -1).view({1, batch * plane, 1, channels}).permute({0, 3, 1, 2});
  }

  /// The inverse for a result of ATen.
  at::Tensor restore(const at::Tensor& flat) const {
    if (!sizes_.rows) return flat.view(x_.sizes());
    const at::Tensor rows = flat.permute({0, 2, 3, 1});
    if (x_.is_contiguous()) return rows.reshape(x_.sizes());
    return rows.reshape(x_.movedim(1, -1).sizes()).movedim(-1, 1);
  }

  /// Calls f with one part of each of the flat tensors after the other. On the CPU temporaries of a
  /// part stay in the cache.
  template <typename F>
  void for_each_part(const std::array<at::Tensor, 3>& tensors, F&& f) const {
    const int64_t dim = sizes_.rows ? 2 : 0, size = tensors[0].size(dim);
    const int64_t numel = x_.is_cpu() ? kPart : x_.numel();
    const int64_t step = std::max<int64_t>(1, numel / (x_.numel() / size));
    for (int64_t i = 0; i < size; i += step) {
      std::array<at::Tensor, 3> parts;
      for (size_t t = 0; t < 3; ++t) parts[t] = tensors[t].narrow(dim, i, std::min(step, size - i));
      f(parts);
    }
  }

  int64_t values_per_channel() const { return sizes_.planes.batch * sizes_.planes.plane; }

 private:
  static constexpr int64_t kPart = int64_t{1} << 17;
  const at::Tensor x_;
  const Sizes sizes_;
};

/// The device of `x`, and the type in which ATen computes its channels.
at::TensorOptions computing(const at::Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

at::Tensor computed(const at::Tensor& tensor, const at::Tensor& x) {
  return tensor.to(computing(x)).contiguous();
}

OptionalTensor computed(const OptionalTensor& tensor, const at::Tensor& x) {
  return present(tensor) ? OptionalTensor(computed(*tensor, x)) : std::nullopt;
}

/// (x - mean) / sqrt(var + eps) * weight + bias.
at::Tensor normalize(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                     const at::Tensor& mean, const at::Tensor& var, double eps) {
  return std::get<0>(at::native_batch_norm(x, weight, bias, mean, var, /*training=*/false,
                                           /*momentum=*/0, eps));
}

/// This rank's record for merge(): mean[C], m2[C], count.
at::Tensor record_of(const at::Tensor& x, const Flat& flat) {
  const int64_t channels = x.size(1), count = flat.values_per_channel();
  const auto float64 = x.options().dtype(at::kDouble);
  if (count == 0) return at::zeros({kernels::statistics_length(channels)}, float64);
  // The arguments for running statistics select the type of the result.
  const auto [mean, var] = at::batch_norm_update_stats(flat(x), at::zeros({channels}, computing(x)),
                                                       at::ones({channels}, computing(x)), 0);
  at::Tensor record = at::cat({mean, var, at::full({1}, count, float64)});
  record.narrow(0, channels, channels).mul_(count);
  return record;
}

/// Statistics of all ranks, in float64 on the CPU.
struct Statistics {
  at::Tensor mean, var;
  double count = 0;
};

Statistics merge(const at::Tensor& records, int64_t channels) {
  Statistics all{at::zeros({channels}, at::kDouble), at::zeros({channels}, at::kDouble)};
  auto* const mean = all.mean.mutable_data_ptr<double>();
  auto* const var = all.var.mutable_data_ptr<double>();
  const auto* const begin = records.const_data_ptr<double>();
  const auto* const end = begin + records.numel();
  const int64_t length = kernels::statistics_length(channels);
  for (const double* rank = begin; rank < end; rank += length) all.count += rank[2 * channels];
  if (all.count == 0) return all;
  for (const double* rank = begin; rank < end; rank += length) {
    const double share = rank[2 * channels] / all.count;
    for (int64_t c = 0; c < channels; ++c) mean[c] += share * rank[c];
  }
  for (const double* rank = begin; rank < end; rank += length) {
    const double share = rank[2 * channels] / all.count;
    for (int64_t c = 0; c < channels; ++c) {
      const double delta = rank[c] - mean[c];
      var[c] += rank[channels + c] / all.count + share * delta * delta;
    }
  }
  return all;
}

/// With fewer than two values neither running statistic changes. Each is rounded once, so its bits
/// are the same on ranks whose inputs have different dtypes.
void update_running(const ForwardArguments& a, const Statistics& all) {
  if (present(a.num_batches_tracked)) a.num_batches_tracked->add_(1);
  if (all.count <= 1) return;
  double factor = a.momentum.value_or(0);
  if (!a.momentum && present(a.num_batches_tracked) && present(a.running_mean)) {
    factor = 1 / a.num_batches_tracked->item<double>();
  }
  const auto update = [&](const OptionalTensor& running, const at::Tensor& value) {
    if (present(running)) running->lerp_(value.to(running->options()), factor);
  };
  update(a.running_mean, all.mean);
  update(a.running_var, all.var * (all.count / (all.count - 1)));
}

}  // namespace

ForwardResult forward_composed(const ForwardArguments& a) {
  const Peers peers = checked_peers(a);
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor x = in_layout(a.input);
  const Flat flat(x);
  const int64_t channels = x.size(1);
  at::Tensor records = record_of(x, flat);
  if (peers) records = all_gather(peers, records, Direction::kForward, channels);
  const Statistics all = merge(records.cpu(), channels);
  check_more_than_one_value(a.input, static_cast<int64_t>(all.count));
  const at::Tensor mean = computed(all.mean, x), var = computed(all.var, x);
  update_running(a, all);
  const at::Tensor output = x.numel() == 0
                                ? at::empty_like(x)
                                : flat.restore(normalize(flat(x), computed(a.weight, x),
                                                         computed(a.bias, x), mean, var, a.eps));
  return {output, all.mean.to(x.device()), (all.var + a.eps).rsqrt_().to(x.device()),
          at::full({1}, static_cast<int64_t>(all.count), x.options().dtype(at::kLong))};
}

BackwardResult backward_composed(const BackwardArguments& a) {
  const Peers peers = checked_peers(a);
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor x = in_layout(a.input);
  const Flat flat(x);
  const int64_t channels = x.size(1);
  const auto zeros = [&] { return at::zeros({channels}, computing(x)); };
  const at::Tensor ones = at::ones({channels}, computing(x));
  const at::Tensor weight = present(a.weight) ? computed(*a.weight, x) : ones;
  const at::Tensor mean = computed(a.mean, x), invstd = computed(a.invstd, x);
  const bool empty = x.numel() == 0;
  at::Tensor dy, sum, dot;
  if (!empty) {
    dy = flat(in_layout_of(x, a.grad_output.to(x.scalar_type())));
    const auto gradients =
        at::native_batch_norm_backward(dy, flat(x), weight, {}, {}, mean, invstd, /*train=*/true,
                                       /*eps=*/0, {false, true, true});
    dot = std::get<1>(gradients);  // with (x - mean) * invstd
    sum = std::get<2>(gradients);
  } else {
    dot = zeros();
    sum = zeros();
  }
  const auto parameter = [&](bool needed, const at::Tensor& gradient) {
    return needed ? gradient.to(parameter_options(a)) : at::empty({0}, parameter_options(a));
  };
  const at::Tensor dweight = parameter(a.needs[1], dot), dbias = parameter(a.needs[2], sum);
  if (!a.needs[0]) return {at::empty({0}, x.options()), dweight, dbias};
  at::Tensor means = at::cat({sum, dot / invstd}).to(at::kDouble);
  if (peers) all_reduce(peers, means, Direction::kBackward, channels);
  if (empty) return {at::empty_like(x), dweight, dbias};
  means = computed(means.div_(a.count.clamp_min(1)), x);
  // dx = scale * (dy - mean(dy)) - scale * xhat * mean(dy * xhat). The terms may cancel, so they
  // are not rounded to 16 bits.
  const at::Tensor scale = invstd * weight, mean_dy = means.narrow(0, 0, channels),
                   of_x = means.narrow(0, channels, channels) * invstd.square() * scale;
  const at::Tensor dx = at::empty_like(flat(x));
  flat.for_each_part({flat(x), dy, dx}, [&](const std::array<at::Tensor, 3>& part) {
    at::Tensor result = part[2];
    const auto wide = [&](size_t t) { return part[t].to(computing(x)); };
    at::sub_out(result, normalize(wide(1), scale, {}, mean_dy, ones, /*eps=*/0),
                normalize(wide(0), of_x, {}, mean, ones, /*eps=*/0));
  });
  return {flat.restore(dx), dweight, dbias};
}

}  // namespace apex::parallel::detail
