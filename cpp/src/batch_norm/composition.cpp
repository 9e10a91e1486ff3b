// SPDX-License-Identifier: BSD-3-Clause
// The operators from ATen's batch norm, for any device that has it. They exchange the same messages
// as the CUDA kernels. ATen computes elements, and loops on the host compute channels in float64,
// so the host waits for a device.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <vector>

#include "batch_norm/sync_batch_norm_ops.h"
#include "kernels/batch_norm_math.h"

namespace apex::parallel::detail {
namespace {

/// What both directions begin with.
class Call {
 public:
  template <typename Arguments>
  explicit Call(const Arguments& a)
      : peers(checked_peers(a)), x(in_layout(a.input)), channels(x.size(1)), sizes_(x) {}

  /// A view of a tensor in the layout of x as ATen processes it fastest: planes as they are, rows
  /// as [1, C, R, 1] in channels-last memory.
  at::Tensor flat(const at::Tensor& tensor) const {
    const auto& [batch, channels, plane] = sizes_.planes;
    if (!sizes_.rows) return tensor;
    return tensor.movedim(1, -1).view({1, batch * plane, 1, channels}).permute({0, 3, 1, 2});
  }

  int64_t values_per_channel() const { return sizes_.planes.batch * sizes_.planes.plane; }

  /// The type in which ATen computes channels.
  at::ScalarType computing() const {
    return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }

  /// Whether ATen computes in the type of the elements.
  bool is_wide() const { return x.scalar_type() == computing(); }

  const Peers peers;
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor x;
  const int64_t channels;

 private:
  const Sizes sizes_;
};

using Channels = std::vector<double>;

/// An uninitialized tensor on the host, without the dispatcher, which takes longer than a small
/// layer's channels.
at::Tensor host_tensor(int64_t numel, at::ScalarType type) {
  return at::Tensor(at::detail::empty_cpu({numel}, type));
}

/// tensor.to(type).
at::Tensor as(at::ScalarType type, const at::Tensor& tensor) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
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

/// The values as a tensor [C], or an empty one.
at::Tensor tensor_of(const Call& call, const Channels& values, at::ScalarType type) {
  const at::Tensor host = host_tensor(static_cast<int64_t>(values.size()), type);
  each_channel(host, [&](int64_t c, auto& value) {
    value = static_cast<std::decay_t<decltype(value)>>(values[c]);
  });
  return on_device_of(call.x, host);
}

/// K<T> for each channel, of(T(), channel), as a tensor [number of coefficients * C] on the host.
template <template <typename> class K, typename Of>
at::Tensor coefficients(const Call& call, Of&& of) {
  constexpr int64_t kCount = sizeof(K<float>) / sizeof(float);
  const at::Tensor table = host_tensor(call.channels * kCount, call.computing());
  AT_DISPATCH_FLOATING_TYPES(call.computing(), "batch norm", [&] {
    auto* const to = table.mutable_data_ptr<scalar_t>();
    for (int64_t c = 0; c < call.channels; ++c) {
      const K<scalar_t> k = of(scalar_t(), c);
      for (int64_t i = 0; i < kCount; ++i)
        to[i * call.channels + c] = reinterpret_cast<const scalar_t*>(&k)[i];
    }
  });
  return table;
}

/// The result of K<T>::of for each element of x and dy, which have one layout. It is rounded once,
/// since its terms may cancel.
template <template <typename> class K>
at::Tensor elementwise(const at::Tensor& x, const at::Tensor& dy, const at::Tensor& table) {
  constexpr int64_t kCount = sizeof(K<float>) / sizeof(float);
  std::vector<int64_t> sizes(x.dim(), 1), strides(x.dim(), 0);
  const int64_t channels = sizes[1] = x.size(1);
  strides[1] = 1;
  const at::Tensor k = on_device_of(x, table).as_strided(sizes, strides);
  if (!x.is_cpu()) {
    const auto of = [&](int64_t i) { return k.as_strided(sizes, strides, i * channels); };
    at::Tensor result = at::addcmul(of(2), as(k.scalar_type(), x) - of(0), of(1));
    if (kCount > 3) result = at::addcmul(result, as(k.scalar_type(), dy), of(3));
    return as(x.scalar_type(), result);
  }
  if (x.scalar_type() == at::kHalf)  // ATen converts with instructions that not every processor has
    return elementwise<K>(x.to(at::kFloat), dy.to(at::kFloat), table).to(at::kHalf);
  at::TensorIterator elements = at::TensorIteratorConfig()
                                    .check_all_same_dtype(false)
                                    .add_owned_output(at::empty_like(x))
                                    .add_const_input(x)
                                    .add_const_input(dy)
                                    .add_const_input(k)
                                    .build();
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x.scalar_type(), "batch norm", [&] {
    using T = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    // The innermost dimension is one channel's plane, or a row of all channels.
    elements.for_each([channels](char** data, const int64_t* strides, int64_t numel, int64_t runs) {
      for (int64_t run = 0; run < runs; ++run) {
        const auto of = [&](int64_t i) { return data[i] + run * strides[4 + i]; };
        auto* const __restrict to = reinterpret_cast<scalar_t*>(of(0));
        const auto* const x = reinterpret_cast<const scalar_t*>(of(1));
        const auto* const dy = reinterpret_cast<const scalar_t*>(of(2));
        const auto* const k = reinterpret_cast<const T*>(of(3));
        const auto coefficients = [&](int64_t i) {
          if constexpr (kCount == 3)
            return K<T>{k[i], k[i + channels], k[i + 2 * channels]};
          else
            return K<T>{k[i], k[i + channels], k[i + 2 * channels], k[i + 3 * channels]};
        };
        const auto result = [&](const K<T>& k, int64_t i) {
          return static_cast<scalar_t>(k.of(static_cast<T>(x[i]), static_cast<T>(dy[i])));
        };
        if (strides[3] == 0) {
          const K<T> channel = coefficients(0);
          for (int64_t i = 0; i < numel; ++i) to[i] = result(channel, i);
        } else {
          for (int64_t i = 0; i < numel; ++i) to[i] = result(coefficients(i), i);
        }
      }
    });
  });
  return elements.output();
}

/// This rank's record for merge(): mean[C], m2[C], count.
at::Tensor record_of(const Call& call) {
  const int64_t channels = call.channels, count = call.values_per_channel();
  at::Tensor record = host_tensor(kernels::statistics_length(channels), at::kDouble);
  if (count == 0 || channels == 0) return record.zero_();
  // The arguments for running statistics select float32 results of 16-bit input.
  const OptionalTensor zeros =
      call.is_wide() ? OptionalTensor()
                     : at::zeros({channels}, call.x.options().dtype(call.computing()));
  const auto [mean, var] = at::batch_norm_update_stats(call.flat(call.x), zeros, zeros, 0);
  auto* const to = record.mutable_data_ptr<double>();
  read(mean, to);
  read(var, to + channels);
  for (int64_t c = 0; c < channels; ++c) to[channels + c] *= static_cast<double>(count);
  to[2 * channels] = static_cast<double>(count);
  return record;
}

/// Statistics of all ranks.
struct Statistics {
  at::Tensor mean;  ///< float64, on the host
  Channels var;
  double count = 0;
};

Statistics merge(const at::Tensor& records, int64_t channels) {
  Statistics all{host_tensor(channels, at::kDouble), Channels(static_cast<size_t>(channels))};
  auto* const mean = all.mean.mutable_data_ptr<double>();
  std::fill_n(mean, channels, 0.0);
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
      all.var[c] += rank[channels + c] / all.count + share * delta * delta;
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
  const auto update = [&](const OptionalTensor& running, const double* values, double scale) {
    if (!present(running)) return;
    const at::Tensor host = on_host(*running);
    each_channel(host, [&](int64_t c, auto& value) {
      const double before = static_cast<double>(value);
      value = static_cast<std::decay_t<decltype(value)>>(before +
                                                         factor * (scale * values[c] - before));
    });
    if (!running->is_cpu()) running->copy_(host);
  };
  update(a.running_mean, all.mean.const_data_ptr<double>(), 1);
  update(a.running_var, all.var.data(), all.count / (all.count - 1));
}

}  // namespace

ForwardResult forward_composed(const ForwardArguments& a) {
  const Call call(a);
  const at::Tensor& x = call.x;
  at::Tensor records = record_of(call);
  if (call.peers) {
    records = on_host(
        all_gather(call.peers, on_device_of(x, records), Direction::kForward, call.channels));
  }
  const Statistics all = merge(records, call.channels);
  const auto count = static_cast<int64_t>(all.count);
  check_more_than_one_value(a.input, count);
  update_running(a, all);
  const at::Tensor invstd = host_tensor(call.channels, at::kDouble),
                   counted = host_tensor(1, at::kLong);
  const auto* const mean = all.mean.const_data_ptr<double>();
  auto* const inverse = invstd.mutable_data_ptr<double>();
  for (int64_t c = 0; c < call.channels; ++c) inverse[c] = 1 / std::sqrt(all.var[c] + a.eps);
  *counted.mutable_data_ptr<int64_t>() = count;
  const Channels weight = values_of(a.weight, call.channels, 1),
                 bias = values_of(a.bias, call.channels);
  const at::Tensor k = coefficients<kernels::NormalizeCoefficients>(call, [&](auto type,
                                                                              int64_t c) {
    return kernels::normalize_coefficients<decltype(type)>(mean[c], inverse[c], weight[c], bias[c]);
  });
  at::Tensor output;
  if (x.is_cpu() && !call.is_wide() && x.numel() > 0 &&
      x.is_contiguous(x.suggest_memory_format())) {
    // ATen converts 16-bit elements with the vector instructions of this processor.
    const auto of = [&](int64_t i) { return k.narrow(0, i * call.channels, call.channels); };
    output = std::get<0>(at::native_batch_norm(x, of(1), of(2), of(0), at::ones_like(of(0)),
                                               /*training=*/false, /*momentum=*/0, /*eps=*/0));
  } else {
    output = elementwise<kernels::NormalizeCoefficients>(x, x, k);
  }
  return {output, on_device_of(x, all.mean), on_device_of(x, invstd), on_device_of(x, counted)};
}

BackwardResult backward_composed(const BackwardArguments& a) {
  const Call call(a);
  const at::Tensor& x = call.x;
  const int64_t channels = call.channels;
  const bool empty = x.numel() == 0;
  const Channels mean = values_of(a.mean, channels), invstd = values_of(a.invstd, channels);
  const at::Tensor sums = host_tensor(2 * channels, at::kDouble);
  auto* const sum_dy = sums.mutable_data_ptr<double>();
  std::fill_n(sum_dy, 2 * channels, 0.0);
  auto* const sum_dy_xmu = sum_dy + channels;  // of dy * (x - mean)
  at::Tensor dy;
  if (!empty) {
    dy = in_layout_of(x, as(x.scalar_type(), a.grad_output));
    const at::Tensor high = tensor_of(call, mean, call.computing()),
                     scale = tensor_of(call, invstd, call.computing());
    // The argument for the weight selects the type of the results, which do not depend on it.
    const auto gradients = at::native_batch_norm_backward(
        call.flat(dy), call.flat(x), /*weight=*/scale, {}, {}, high, scale,
        /*train=*/true, /*eps=*/0, {false, true, true});
    read(std::get<1>(gradients), sum_dy_xmu);  // with (x - high) * scale
    read(std::get<2>(gradients), sum_dy);
    const Channels rounded = values_of(high, channels), factor = values_of(scale, channels);
    for (int64_t c = 0; c < channels; ++c)
      sum_dy_xmu[c] = sum_dy_xmu[c] / factor[c] - (mean[c] - rounded[c]) * sum_dy[c];
  }
  Channels of_weight, of_bias;
  for (int64_t c = 0; c < channels; ++c) {
    if (a.needs[1]) of_weight.push_back(sum_dy_xmu[c] * invstd[c]);
    if (a.needs[2]) of_bias.push_back(sum_dy[c]);
  }
  const auto type = parameter_options(a).dtype().toScalarType();
  const at::Tensor dweight = tensor_of(call, of_weight, type),
                   dbias = tensor_of(call, of_bias, type);
  if (!a.needs[0]) return {at::empty({0}, x.options()), dweight, dbias};
  at::Tensor all = sums;
  if (call.peers) {
    all = on_device_of(x, sums);
    all_reduce(call.peers, all, Direction::kBackward, channels);
    all = on_host(all);
  }
  if (empty) return {at::empty_like(x), dweight, dbias};
  const auto* const all_dy = all.const_data_ptr<double>();
  const Channels weight = values_of(a.weight, channels, 1);
  const int64_t count = *on_host(a.count).const_data_ptr<int64_t>();
  const double inverse_count = count > 0 ? 1.0 / static_cast<double>(count) : 0;
  const at::Tensor k = coefficients<kernels::GradientCoefficients>(call, [&](auto type, int64_t c) {
    return kernels::gradient_coefficients<decltype(type)>(mean[c], invstd[c], weight[c], all_dy[c],
                                                          all_dy[channels + c], inverse_count);
  });
  return {elementwise<kernels::GradientCoefficients>(x, dy, k), dweight, dbias};
}

}  // namespace apex::parallel::detail
