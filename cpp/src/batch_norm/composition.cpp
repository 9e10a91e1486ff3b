// SPDX-License-Identifier: BSD-3-Clause
// The operators without CUDA kernels. On the CPU, loops compute elements in float32 or float64, and
// ATen converts 16-bit ones. On other devices ATen's operators compute elements, and the host waits
// in forward. Loops on the host compute channels in float64.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include "batch_norm/sync_batch_norm_ops.h"
#include "kernels/batch_norm_math.h"

namespace apex::parallel::detail {
namespace {

/// tensor.to(type).
at::Tensor as(at::ScalarType type, const at::Tensor& tensor) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
}

/// What both directions begin with.
struct Call {
  template <typename Arguments>
  explicit Call(const Arguments& a)
      : peers(checked_peers(a)),
        type(computing_type(a.input)),
        x(as(type, in_layout(a.input))),
        channels(x.size(1)),
        sizes(x) {}

  const Peers peers;
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::ScalarType type;  ///< in which elements are computed
  const at::Tensor x;
  const int64_t channels;
  const Sizes sizes;
};

using Channels = std::vector<double>;

/// An uninitialized tensor on the host, without the dispatcher, which takes longer than a small
/// layer's channels.
at::Tensor host_tensor(int64_t numel, at::ScalarType type) {
  return at::Tensor(at::detail::empty_cpu({numel}, type));
}

at::Tensor on_host(const at::Tensor& tensor) { return tensor.is_cpu() ? tensor : tensor.cpu(); }

at::Tensor on_device_of(const at::Tensor& x, const at::Tensor& host) {
  return x.is_cpu() ? host : host.to(x.device());
}

/// Calls f(channel, value) for values [C] of any floating type and stride in host memory.
template <typename F>
void each_channel(const at::Tensor& host, F&& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, host.scalar_type(), "batch norm", [&] {
    auto* value = static_cast<scalar_t*>(host.mutable_data_ptr());
    const int64_t channels = host.numel(), stride = host.stride(0);
    for (int64_t c = 0; c < channels; ++c, value += stride) f(c, *value);
  });
}

void read(const at::Tensor& tensor, double* to) {
  each_channel(on_host(tensor),
               [to](int64_t c, auto value) { to[c] = static_cast<double>(value); });
}

/// The values of a tensor [C]; `absent` without it.
Channels values_of(const OptionalTensor& tensor, int64_t channels, double absent = 0) {
  Channels values(static_cast<size_t>(channels), absent);
  if (present(tensor)) read(*tensor, values.data());
  return values;
}

/// The values as a tensor on the host.
at::Tensor tensor_of(const Channels& values, at::ScalarType type) {
  const at::Tensor host = host_tensor(static_cast<int64_t>(values.size()), type);
  each_channel(host, [&](int64_t c, auto& value) {
    value = static_cast<std::decay_t<decltype(value)>>(values[c]);
  });
  return host;
}

/// K<T> for each channel, of(T(), channel), as a tensor [number of coefficients * C] on the host.
template <template <typename> class K, typename Of>
at::Tensor coefficients(const Call& call, Of&& of) {
  constexpr int64_t kCount = sizeof(K<float>) / sizeof(float);
  const at::Tensor table = host_tensor(call.channels * kCount, call.type);
  AT_DISPATCH_FLOATING_TYPES(call.type, "batch norm", [&] {
    auto* const to = table.mutable_data_ptr<scalar_t>();
    for (int64_t c = 0; c < call.channels; ++c) {
      const K<scalar_t> k = of(scalar_t(), c);
      for (int64_t i = 0; i < kCount; ++i)
        to[i * call.channels + c] = reinterpret_cast<const scalar_t*>(&k)[i];
    }
  });
  return table;
}

/// The number of items of `each` elements that are worth a thread.
int64_t items_per_thread(int64_t each) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, each));
}

/// K<T>::of for each element of x and dy, tensors of one layout on the CPU.
template <template <typename> class K, typename T>
at::Tensor elements(const Call& call, const at::Tensor& dy, const at::Tensor& table) {
  const at::Tensor result = at::empty_like(call.x);
  const T *const x = call.x.const_data_ptr<T>(), *const dys = dy.const_data_ptr<T>(),
                 *const k = table.const_data_ptr<T>();
  T* const out = result.mutable_data_ptr<T>();
  const int64_t channels = call.channels;
  const auto of_channel = [k, channels](int64_t c) {
    if constexpr (sizeof(K<T>) == 3 * sizeof(T))
      return K<T>{k[c], k[c + channels], k[c + 2 * channels]};
    else
      return K<T>{k[c], k[c + channels], k[c + 2 * channels], k[c + 3 * channels]};
  };
  // A run is one channel's plane, or a row of all channels.
  const bool rows = call.sizes.rows;
  const int64_t length = rows ? channels : call.sizes.planes.plane;
  const int64_t runs = length > 0 ? call.x.numel() / length : 0;
  at::parallel_for(0, runs, items_per_thread(length), [&](int64_t run, int64_t end) {
    for (; run < end; ++run) {
      const T *const from = x + run * length, *const dy_from = dys + run * length;
      T* const __restrict to = out + run * length;
      if (rows) {
        for (int64_t c = 0; c < length; ++c) to[c] = of_channel(c).of(from[c], dy_from[c]);
      } else {
        const K<T> channel = of_channel(run % channels);
        for (int64_t i = 0; i < length; ++i) to[i] = channel.of(from[i], dy_from[i]);
      }
    }
  });
  return result;
}

/// Adds term(x, dy, mean of the channel), an array, over all values of each channel to
/// sums [size of the array, C], on the CPU.
template <size_t kSums, typename Term>
void sum_channels(const Call& call, const at::Tensor& dy, const double* mean, double* sums,
                  const Term& term) {
  constexpr int64_t kLanes = 16;  // independent sums, which a processor adds in parallel
  const int64_t batch = call.sizes.planes.batch, plane = call.sizes.planes.plane;
  const int64_t channels = call.channels, rows = call.sizes.rows ? batch * plane : 0;
  const int64_t per_thread = std::max(items_per_thread(batch * plane), rows > 0 ? kLanes : 1);
  AT_DISPATCH_FLOATING_TYPES(call.type, "batch norm", [&] {
    const auto* const x = call.x.const_data_ptr<scalar_t>();
    const auto* const dys = dy.const_data_ptr<scalar_t>();
    at::parallel_for(0, channels, per_thread, [&](int64_t begin, int64_t end) {
      const auto add = [&](int64_t at, double mean, double* to, int64_t stride) {
        const std::array<double, kSums> terms =
            term(static_cast<double>(x[at]), static_cast<double>(dys[at]), mean);
        for (size_t s = 0; s < kSums; ++s) to[static_cast<int64_t>(s) * stride] += terms[s];
      };
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t c = begin; c < end; ++c) add(row * channels + c, mean[c], sums + c, channels);
      }
      for (int64_t c = begin; rows == 0 && c < end; ++c) {
        double lanes[kSums * kLanes] = {};
        for (int64_t n = 0; n < batch; ++n) {
          int64_t at = (n * channels + c) * plane;
          const int64_t after = at + plane;
          for (; at + kLanes <= after; at += kLanes)
            for (int64_t i = 0; i < kLanes; ++i) add(at + i, mean[c], lanes + i, kLanes);
          for (; at < after; ++at) add(at, mean[c], lanes, kLanes);
        }
        for (size_t i = 0; i < kSums * kLanes; ++i)
          sums[static_cast<int64_t>(i) / kLanes * channels + c] += lanes[i];
      }
    });
  });
}

/// The dimensions of x without that of channels.
std::vector<int64_t> other_dimensions(const at::Tensor& x) {
  std::vector<int64_t> others;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (d != 1) others.push_back(d);
  }
  return others;
}

/// A view of [C] that broadcasts to the shape of x.
at::Tensor spread(const at::Tensor& channels, const at::Tensor& x) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[1] = -1;
  return channels.view(shape);
}

/// This rank's record for merge(): mean[C], m2[C], count.
at::Tensor record_of(const Call& call) {
  const int64_t channels = call.channels;
  const auto count = static_cast<double>(call.sizes.planes.batch * call.sizes.planes.plane);
  at::Tensor record = host_tensor(kernels::statistics_length(channels), at::kDouble);
  auto* const mean = record.mutable_data_ptr<double>();
  double* const m2 = mean + channels;
  std::fill_n(mean, 2 * channels, 0.0);
  m2[channels] = count;
  if (call.x.numel() == 0) return record;
  if (call.x.is_cpu()) {
    using Sum = std::array<double, 1>;
    sum_channels<1>(call, call.x, m2, mean, [](double x, double, double) { return Sum{x}; });
    for (int64_t c = 0; c < channels; ++c) mean[c] /= count;
    sum_channels<1>(call, call.x, mean, m2,
                    [](double x, double, double mean) { return Sum{(x - mean) * (x - mean)}; });
  } else {
    const auto [var_of, mean_of] =
        at::var_mean(call.x, other_dimensions(call.x), /*correction=*/0, /*keepdim=*/false);
    read(mean_of, mean);
    read(var_of, m2);
    for (int64_t c = 0; c < channels; ++c) m2[c] *= count;
  }
  return record;
}

/// Statistics of all ranks.
using Statistics = std::vector<kernels::Welford<double>>;

Statistics merge(const at::Tensor& records, int64_t channels) {
  Statistics all(static_cast<size_t>(channels));
  const auto* rank = records.const_data_ptr<double>();
  const int64_t length = kernels::statistics_length(channels);
  for (const double* const end = rank + records.numel(); rank < end; rank += length) {
    for (int64_t c = 0; c < channels; ++c)
      all[c].merge(rank[c], rank[channels + c], rank[2 * channels]);
  }
  return all;
}

void update_running(const ForwardArguments& a, const Statistics& all) {
  int64_t batches = 0;
  if (present(a.num_batches_tracked)) {
    a.num_batches_tracked->add_(1);
    if (!a.momentum) batches = a.num_batches_tracked->item().toLong();
  }
  const double factor = kernels::running_factor(a.momentum.value_or(kernels::kNoMomentum), batches);
  const auto update = [&](const OptionalTensor& running, auto&& updated) {
    if (!present(running)) return;
    const at::Tensor host = on_host(*running);
    each_channel(host, [&](int64_t c, auto& value) {
      value = static_cast<std::decay_t<decltype(value)>>(
          updated(static_cast<double>(value), all[c], factor));
    });
    if (!running->is_cpu()) running->copy_(host);
  };
  update(a.running_mean, kernels::update_running_mean);
  update(a.running_var, kernels::update_running_var);
}

}  // namespace

ForwardResult forward_composed(const ForwardArguments& a) {
  using kernels::NormalizeCoefficients;
  const Call call(a);
  const at::Tensor& x = call.x;
  at::Tensor records = record_of(call);
  if (call.peers) {
    records = on_host(
        all_gather(call.peers, on_device_of(x, records), Direction::kForward, call.channels));
  }
  const Statistics all = merge(records, call.channels);
  const auto values = all.empty() ? 0 : static_cast<int64_t>(all[0].count);
  check_more_than_one_value(a.input, values);
  update_running(a, all);
  const at::Tensor means = host_tensor(call.channels, at::kDouble),
                   invstds = host_tensor(call.channels, at::kDouble),
                   count = host_tensor(1, at::kLong);
  *count.mutable_data_ptr<int64_t>() = values;
  auto *const mean = means.mutable_data_ptr<double>(), *const invstd =
                                                           invstds.mutable_data_ptr<double>();
  for (int64_t c = 0; c < call.channels; ++c) {
    mean[c] = all[c].mean;
    invstd[c] = 1 / std::sqrt(all[c].m2 / std::max(all[c].count, 1.0) + a.eps);
  }
  const Channels weight = values_of(a.weight, call.channels, 1),
                 bias = values_of(a.bias, call.channels);
  const at::Tensor table = coefficients<NormalizeCoefficients>(call, [&](auto type, int64_t c) {
    return kernels::normalize_coefficients<decltype(type)>(mean[c], invstd[c], weight[c], bias[c]);
  });
  at::Tensor output;
  if (x.is_cpu()) {
    AT_DISPATCH_FLOATING_TYPES(call.type, "batch norm", [&] {
      output = elements<NormalizeCoefficients, scalar_t>(call, x, table);
    });
  } else {
    const at::Tensor k = table.to(x.device()).view({-1, call.channels});
    output = at::addcmul(spread(k[2], x), x - spread(k[0], x), spread(k[1], x));
  }
  return {as(a.input.scalar_type(), output), on_device_of(x, means), on_device_of(x, invstds),
          on_device_of(x, count)};
}

BackwardResult backward_composed(const BackwardArguments& a) {
  using kernels::GradientCoefficients;
  if (!a.input.is_cpu()) {
    check(a);
    const at::AutoDispatchBelowADInplaceOrView below;
    return backward_formula(a, /*eps=*/std::nullopt);
  }
  const Call call(a);
  const at::Tensor& x = call.x;
  const int64_t channels = call.channels;
  const at::Tensor dy = in_layout_of(x, as(call.type, a.grad_output));
  const Channels mean = values_of(a.mean, channels), invstd = values_of(a.invstd, channels);
  at::Tensor sums = host_tensor(2 * channels, at::kDouble);
  const auto* const sum_dy = sums.mutable_data_ptr<double>();
  const double* const sum_dy_xmu = sum_dy + channels;  // of dy * (x - mean)
  std::fill_n(sums.mutable_data_ptr<double>(), 2 * channels, 0.0);
  sum_channels<2>(
      call, dy, mean.data(), sums.mutable_data_ptr<double>(),
      [](double x, double dy, double mean) { return std::array<double, 2>{dy, dy * (x - mean)}; });
  Channels of_weight, of_bias;
  for (int64_t c = 0; c < channels; ++c) {
    if (a.needs[1]) of_weight.push_back(sum_dy_xmu[c] * invstd[c]);
    if (a.needs[2]) of_bias.push_back(sum_dy[c]);
  }
  const auto type = parameter_options(a).dtype().toScalarType();
  const at::Tensor dweight = tensor_of(of_weight, type), dbias = tensor_of(of_bias, type);
  if (!a.needs[0]) return {at::empty({0}, a.input.options()), dweight, dbias};
  if (call.peers) all_reduce(call.peers, sums, Direction::kBackward, channels);
  const Channels weight = values_of(a.weight, channels, 1);
  const int64_t count = *a.count.const_data_ptr<int64_t>();
  const double inverse_count = count > 0 ? 1.0 / static_cast<double>(count) : 0;
  const at::Tensor table = coefficients<GradientCoefficients>(call, [&](auto type, int64_t c) {
    return kernels::gradient_coefficients<decltype(type)>(mean[c], invstd[c], weight[c], sum_dy[c],
                                                          sum_dy_xmu[c], inverse_count);
  });
  at::Tensor dx;
  AT_DISPATCH_FLOATING_TYPES(call.type, "batch norm", [&] {
    dx = elements<GradientCoefficients, scalar_t>(call, dy, table);
  });
  return {as(a.input.scalar_type(), dx), dweight, dbias};
}

BackwardResult backward_formula(const BackwardArguments& a, std::optional<double> eps) {
  const auto type = computing_type(a.input);
  const auto sum = [others = other_dimensions(a.input)](const at::Tensor& elements) {
    return elements.sum(others);
  };
  const auto all_mean = [&](const at::Tensor& local) {
    return differentiable_sum(local, a.group_name, a.layer) / a.count.clamp_min(1).to(type);
  };
  const at::Tensor x = a.input.to(type), dy = a.grad_output.to(type);
  at::Tensor centered, invstd;
  if (eps) {
    centered = x - spread(all_mean(sum(x)), x);
    invstd = (all_mean(sum(centered.square())) + *eps).rsqrt();
  } else {  // see Note [The mean in two parts]
    const at::Tensor high = a.mean.to(type);
    centered = x - spread(high, x) - spread((a.mean - high).to(type), x);
    invstd = a.invstd.to(type);
  }
  const at::Tensor xhat = centered * spread(invstd, x);
  const at::Tensor dbias = sum(dy), dweight = sum(dy * xhat);
  const auto parameter = [&](bool needed, const at::Tensor& gradient) {
    const at::TensorOptions options = parameter_options(a);
    return needed ? gradient.to(options) : at::empty({0}, options);
  };
  at::Tensor dx = at::empty({0}, a.input.options());
  if (a.needs[0]) {
    const at::Tensor means = all_mean(at::stack({dbias, dweight}));
    const at::Tensor scale = present(a.weight) ? invstd * a.weight->to(type) : invstd;
    dx = (dy - spread(means[0], x) - xhat * spread(means[1], x)) * spread(scale, x);
    dx = dx.to(a.input.scalar_type());
  }
  return {dx, parameter(a.needs[1], dweight), parameter(a.needs[2], dbias)};
}

}  // namespace apex::parallel::detail
