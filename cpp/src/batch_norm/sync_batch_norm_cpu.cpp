// The batch-norm operators on the CPU: splits the work over threads, does what is per channel, and
// talks to the other ranks once per direction.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "batch_norm/cpu_memory_cache.h"
#include "batch_norm/sync_batch_norm_common.h"
#include "kernels/processor_cache.h"

namespace apex::parallel::detail {
namespace {

using kernels::ChannelParam;
using kernels::CpuKernels;
using kernels::ReluMask;
using kernels::Welford;

// Below this many elements a thread costs more than it saves (at::parallel_for's usual grain).
constexpr int64_t kGrainElements = 32768;

int64_t grain(int64_t elements_per_item) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_per_item));
}

/// A new result of the size of the input, where an old one was if there is one that nobody uses any
/// more.
at::Tensor new_result(const at::Tensor& like, MemoryLayout layout) {
  return empty_in_layout(like, layout,
                         [](c10::SymIntArrayRef sizes, const at::TensorOptions& options,
                            std::optional<at::MemoryFormat> format) {
                           return at::Tensor(at::detail::empty_generic(
                               C10_AS_INTARRAYREF_SLOW(sizes), cpu_cache_allocator(),
                               c10::DispatchKeySet(c10::DispatchKey::CPU),
                               c10::typeMetaToScalarType(options.dtype()), format));
                         });
}

/// Whether a pass over `arrays` arrays like this one writes its result past the caches: once they
/// together are more than half of the last cache (others use it, too), whoever reads the result
/// will not find it there.
bool outgrows_cache(const at::Tensor& like, int arrays) {
  return like.nbytes() * static_cast<size_t>(arrays) > kernels::last_cache_bytes() / 2;
}

template <typename T>
const T* data_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->const_data_ptr<T>() : nullptr;
}

OptionalTensor optional_to_layout(const OptionalTensor& tensor, MemoryLayout layout) {
  if (tensor.has_value() && tensor->defined()) {
    return to_layout(*tensor, layout);
  }
  return std::nullopt;
}

/// One entry per channel of each coefficient, as the row kernels want them.
template <typename Acc>
struct RowCoefficients {
  std::vector<Acc> storage;
  const Acc* columns[3];

  explicit RowCoefficients(int64_t channels) : storage(3 * static_cast<size_t>(channels)) {
    for (int i = 0; i < 3; ++i) {
      columns[i] = storage.data() + i * channels;
    }
  }
  void set(int64_t channel, Acc first, Acc second, Acc third) {
    const size_t channels = storage.size() / 3;
    storage[channel] = first;
    storage[channels + channel] = second;
    storage[2 * channels + channel] = third;
  }
};

/// Runs part(begin, end, sums) over the rows, with zeroed sums[2 * channels] of its own per part,
/// then combine(begin, end, sums) one part after the other, in order of the rows.
template <typename Part, typename Combine>
void reduce_rows(int64_t rows, int64_t channels, const Part& part, const Combine& combine) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t per_part = std::max(grain(channels), (rows + threads - 1) / threads);
  const int64_t parts = rows == 0 ? 0 : (rows + per_part - 1) / per_part;
  std::vector<double> sums(static_cast<size_t>(2 * channels * parts));
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      part(i * per_part, std::min(rows, (i + 1) * per_part), sums.data() + 2 * channels * i);
    }
  });
  for (int64_t i = 0; i < parts; ++i) {
    combine(i * per_part, std::min(rows, (i + 1) * per_part), sums.data() + 2 * channels * i);
  }
}

template <typename T>
void local_statistics(const T* x, const Sizes& sizes, double* mean, double* m2) {
  const CpuKernels<T>& k = kernels::cpu_kernels<T>();
  const int64_t channels = sizes.planes.channels;
  if (!sizes.rows) {
    at::parallel_for(0, channels, grain(sizes.values_per_channel()), [&](int64_t b, int64_t e) {
      for (int64_t c = b; c < e; ++c) {
        const Welford<double> local = k.planes_statistics(x, sizes.planes, c);
        mean[c] = local.mean;
        m2[c] = local.m2;
      }
    });
    return;
  }
  std::fill(mean, mean + channels, 0.0);
  std::fill(m2, m2 + channels, 0.0);
  int64_t count = 0;
  reduce_rows(
      sizes.values_per_channel(), channels,
      [&](int64_t begin, int64_t end, double* sums) {
        k.rows_statistics(x, begin, end, channels, sums, sums + channels, 0);
      },
      [&](int64_t begin, int64_t end, const double* sums) {
        for (int64_t c = 0; c < channels; ++c) {
          Welford<double> all{mean[c], m2[c], static_cast<double>(count)};
          all.merge(sums[c], sums[channels + c], static_cast<double>(end - begin));
          mean[c] = all.mean;
          m2[c] = all.m2;
        }
        count += end - begin;
      });
}

/// Mean and 1 / deviation of all channels, converted once.
struct LoadedStatistics {
  std::vector<double> mean, invstd;

  LoadedStatistics(const kernels::ChannelStatistics& from, int64_t channels)
      : mean(channels), invstd(channels) {
    for (int64_t c = 0; c < channels; ++c) {
      mean[c] = from.load_mean(c);
      invstd[c] = from.load_invstd(c);
    }
  }
};

/// Everything the normalizing pass knows about a channel.
struct Affine {
  ChannelParam weight;
  ChannelParam bias;

  template <typename Acc>
  kernels::NormalizeCoefficients<Acc> coefficients(int64_t c, double mean, double invstd) const {
    return kernels::normalize_coefficients<Acc>(mean, invstd, weight.load(c, 1), bias.load(c, 0));
  }
};

template <typename T>
void normalize(const T* x, const T* z, T* y, const Sizes& sizes, const double* mean,
               const double* invstd, const Affine& affine, bool relu, bool stream) {
  using Acc = typename CpuKernels<T>::Acc;
  const CpuKernels<T>& k = kernels::cpu_kernels<T>();
  const int64_t channels = sizes.planes.channels;
  if (!sizes.rows) {
    at::parallel_for(0, channels, grain(sizes.values_per_channel()), [&](int64_t b, int64_t e) {
      for (int64_t c = b; c < e; ++c) {
        k.planes_normalize(x, z, y, sizes.planes, c,
                           affine.coefficients<Acc>(c, mean[c], invstd[c]), relu, stream);
      }
    });
    return;
  }
  RowCoefficients<Acc> rows(channels);
  for (int64_t c = 0; c < channels; ++c) {
    const auto f = affine.coefficients<Acc>(c, mean[c], invstd[c]);
    rows.set(c, f.high, f.scale, f.shift);
  }
  at::parallel_for(0, sizes.values_per_channel(), grain(channels), [&](int64_t b, int64_t e) {
    k.rows_normalize(x, z, y, b, e, channels, rows.columns[0], rows.columns[1], rows.columns[2],
                     relu, stream);
  });
}

ForwardResult forward_cpu(const at::Tensor& input, const OptionalTensor& z,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& running_mean, const OptionalTensor& running_var,
                          const OptionalTensor& num_batches_tracked, std::optional<double> momentum,
                          double eps, bool channel_last, bool fuse_relu,
                          c10::string_view group_name) {
  const Peers peers = find_peers(group_name);
  {
    const BeforeExchange checking(peers, Direction::kForward);
    check_forward(input, z, weight, bias, running_mean, running_var, num_batches_tracked,
                  channel_last);
    check_updated(running_mean, running_var);
  }
  const MemoryLayout layout = layout_of(input, channel_last);
  const at::Tensor x = to_layout(input, layout);
  const OptionalTensor added = optional_to_layout(z, layout);
  const Sizes sizes = sizes_of(x, layout);
  const int64_t channels = sizes.planes.channels;
  if (!peers) {
    check_more_than_one_value(input, sizes.values_per_channel());
  }

  const auto float64 = input.options().dtype(at::kDouble);
  at::Tensor output = new_result(x, layout);
  at::Tensor mean = at::empty({channels}, float64);
  at::Tensor invstd = at::empty({channels}, float64);
  at::Tensor count = at::empty({1}, input.options().dtype(at::kLong));
  double* means = mean.mutable_data_ptr<double>();
  double* invstds = invstd.mutable_data_ptr<double>();

  const Affine affine{channel_param(weight), channel_param(bias)};
  const ChannelParam r_mean = channel_param(running_mean);
  const ChannelParam r_var = channel_param(running_var);
  int64_t batches = 0;
  const at::Tensor counter = counter_as_int64(num_batches_tracked);
  if (counter.defined()) {
    batches = *counter.const_data_ptr<int64_t>() + 1;
  }
  const double factor = kernels::running_factor(momentum.value_or(kernels::kNoMomentum), batches);
  const auto finish_channel = [&](int64_t c, const Welford<double>& all) {
    means[c] = all.mean;
    invstds[c] = kernels::inverse_deviation(all, eps);
    r_mean.store(c, kernels::update_running_mean(r_mean.load(c, 0), all, factor));
    r_var.store(c, kernels::update_running_var(r_var.load(c, 0), all, factor));
  };

  visit_element_type(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using Acc = typename CpuKernels<T>::Acc;
    const T* from = x.const_data_ptr<T>();
    const T* plus = data_or_null<T>(added);
    T* to = output.mutable_data_ptr<T>();
    const double local_count = static_cast<double>(sizes.values_per_channel());
    const bool stream = outgrows_cache(x, added.has_value() ? 3 : 2);
    if (!peers && !sizes.rows) {
      // Nobody to wait for: a channel is normalized while it is still in the cache.
      const CpuKernels<T>& k = kernels::cpu_kernels<T>();
      at::parallel_for(0, channels, grain(sizes.values_per_channel()), [&](int64_t b, int64_t e) {
        for (int64_t c = b; c < e; ++c) {
          finish_channel(c, k.planes_statistics(from, sizes.planes, c));
          k.planes_normalize(from, plus, to, sizes.planes, c,
                             affine.coefficients<Acc>(c, means[c], invstds[c]), fuse_relu, stream);
        }
      });
      *count.mutable_data_ptr<int64_t>() = sizes.values_per_channel();
      return;
    }
    at::Tensor record = at::empty({kernels::statistics_length(channels)}, float64);
    double* local = record.mutable_data_ptr<double>();
    local_statistics(from, sizes, local, local + channels);
    local[2 * channels] = local_count;
    const at::Tensor gathered =
        peers ? all_gather(peers, record, Direction::kForward, channels) : record;
    const int64_t ranks = peers ? peers.group->getSize() : 1;
    const double* records = gathered.const_data_ptr<double>();
    double total = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      total += records[(rank + 1) * kernels::statistics_length(channels) - 1];
    }
    check_more_than_one_value(input, static_cast<int64_t>(total));
    for (int64_t c = 0; c < channels; ++c) {
      finish_channel(c, kernels::merge_ranks(records, ranks, channels, c));
    }
    *count.mutable_data_ptr<int64_t>() = static_cast<int64_t>(total);
    normalize(from, plus, to, sizes, means, invstds, affine, fuse_relu, stream);
  });
  if (counter.defined()) {
    *counter.mutable_data_ptr<int64_t>() = batches;
    store_counter(num_batches_tracked, counter);
  }
  return {output, mean, invstd, count};
}

at::Tensor inference_cpu(const at::Tensor& input, const OptionalTensor& z,
                         const OptionalTensor& weight, const OptionalTensor& bias,
                         const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
                         bool channel_last, bool fuse_relu) {
  check_forward(input, z, weight, bias, running_mean, running_var, std::nullopt, channel_last);
  const MemoryLayout layout = layout_of(input, channel_last);
  const at::Tensor x = to_layout(input, layout);
  const OptionalTensor added = optional_to_layout(z, layout);
  const Sizes sizes = sizes_of(x, layout);
  const int64_t channels = sizes.planes.channels;
  const LoadedStatistics statistics(
      channel_statistics(running_mean, running_var, /*constant=*/true, eps), channels);
  at::Tensor output = new_result(x, layout);
  visit_element_type(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    normalize(x.const_data_ptr<T>(), data_or_null<T>(added), output.mutable_data_ptr<T>(), sizes,
              statistics.mean.data(), statistics.invstd.data(),
              Affine{channel_param(weight), channel_param(bias)}, fuse_relu,
              outgrows_cache(x, added.has_value() ? 3 : 2));
  });
  return output;
}

/// Into sum_dy[channels] and sum_dy_xmu[channels], which hold zeros.
template <typename T>
void local_reduction(const T* dy, const T* x, const T* y, const Sizes& sizes,
                     const RowCoefficients<typename CpuKernels<T>::Acc>& rows, ReluMask mask,
                     double* sum_dy, double* sum_dy_xmu) {
  const CpuKernels<T>& k = kernels::cpu_kernels<T>();
  const int64_t channels = sizes.planes.channels;
  if (!sizes.rows) {
    at::parallel_for(0, channels, grain(sizes.values_per_channel()), [&](int64_t b, int64_t e) {
      for (int64_t c = b; c < e; ++c) {
        const auto sums =
            k.planes_reduce(dy, x, y, sizes.planes, c,
                            {rows.columns[0][c], rows.columns[1][c], rows.columns[2][c]}, mask);
        sum_dy[c] = sums.sum_dy;
        sum_dy_xmu[c] = sums.sum_dy_xmu;
      }
    });
    return;
  }
  reduce_rows(
      sizes.values_per_channel(), channels,
      [&](int64_t begin, int64_t end, double* sums) {
        k.rows_reduce(dy, x, y, begin, end, channels, rows.columns[0], rows.columns[1],
                      rows.columns[2], mask, sums, sums + channels);
      },
      [&](int64_t, int64_t, const double* sums) {
        for (int64_t c = 0; c < channels; ++c) {
          sum_dy[c] += sums[c];
          sum_dy_xmu[c] += sums[channels + c];
        }
      });
}

BackwardResult backward_cpu(const at::Tensor& grad_output, const at::Tensor& input,
                            const OptionalTensor& output, const OptionalTensor& weight,
                            const OptionalTensor& bias, const at::Tensor& mean,
                            const at::Tensor& invstd_or_var, const OptionalTensor& count,
                            double eps, bool channel_last, bool fuse_relu, OutputMask needs,
                            c10::string_view group_name) {
  check_backward(grad_output, input, output, weight, bias, mean, invstd_or_var, count,
                 channel_last);
  const MemoryLayout layout = layout_of(input, channel_last);
  const at::Tensor x = to_layout(input, layout);
  const at::Tensor dy = to_layout(grad_output.to(input.scalar_type()), layout);
  const OptionalTensor out = optional_to_layout(output, layout);
  const Sizes sizes = sizes_of(x, layout);
  const int64_t channels = sizes.planes.channels;
  const bool training = count.has_value() && count->defined();
  const ReluMask mask = !fuse_relu        ? ReluMask::kNone
                        : out.has_value() ? ReluMask::kOutput
                                          : ReluMask::kRecompute;
  const Peers peers = training && needs[0] ? find_peers(group_name) : Peers();
  const Affine affine{channel_param(weight), channel_param(bias)};

  const auto none = [&] { return at::empty({0}, input.options()); };
  const auto param_gradient = [&](bool needed, const OptionalTensor& parameter) {
    return needed && parameter.has_value() && parameter->defined()
               ? at::empty({channels}, parameter->options())
               : none();
  };
  at::Tensor dx = needs[0] ? new_result(x, layout) : none();
  at::Tensor dz = needs[1] && fuse_relu ? new_result(x, layout) : none();
  at::Tensor dweight = param_gradient(needs[2], weight);
  at::Tensor dbias = param_gradient(needs[3], bias);
  const ChannelParam to_weight =
      dweight.size(0) == channels ? channel_param(dweight) : ChannelParam{};
  const ChannelParam to_bias = dbias.size(0) == channels ? channel_param(dbias) : ChannelParam{};
  const bool writes_elements = needs[0] || dz.numel() > 0;
  const bool reduces = (training && needs[0]) || to_weight.present() || to_bias.present();

  const LoadedStatistics statistics(channel_statistics(mean, invstd_or_var, !training, eps),
                                    channels);
  const std::vector<double>& means = statistics.mean;
  const std::vector<double>& invstds = statistics.invstd;
  const double total = training ? static_cast<double>(*count->const_data_ptr<int64_t>()) : 0.0;

  visit_element_type(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using Acc = typename CpuKernels<T>::Acc;
    const CpuKernels<T>& k = kernels::cpu_kernels<T>();
    const T* gradient = dy.const_data_ptr<T>();
    const T* values = x.const_data_ptr<T>();
    const T* outputs = data_or_null<T>(out);
    T* to_x = needs[0] ? dx.mutable_data_ptr<T>() : nullptr;
    T* to_z = dz.numel() > 0 ? dz.mutable_data_ptr<T>() : nullptr;
    at::Tensor unused;
    if (writes_elements && to_x == nullptr) {  // the kernels always write dx
      unused = new_result(x, layout);
      to_x = unused.mutable_data_ptr<T>();
    }

    const bool stream = outgrows_cache(x, 3);
    RowCoefficients<Acc> forward(channels);
    for (int64_t c = 0; c < channels; ++c) {
      const auto f = affine.coefficients<Acc>(c, means[c], invstds[c]);
      forward.set(c, f.high, f.scale, f.shift);
    }
    const auto forward_of = [&](int64_t c) {
      return kernels::NormalizeCoefficients<Acc>{forward.columns[0][c], forward.columns[1][c],
                                                 forward.columns[2][c]};
    };
    // The kernels measure from `high`; the rest of the mean is taken off here.
    const auto from_mean = [&](int64_t c, double sum_dy, double sum_dy_high) {
      return sum_dy_high - (means[c] - static_cast<double>(forward.columns[0][c])) * sum_dy;
    };
    const auto store_parameters = [&](int64_t c, double sum_dy, double sum_dy_xmu) {
      to_weight.store(c, sum_dy_xmu * invstds[c]);
      to_bias.store(c, sum_dy);
    };
    const auto backward_of = [&](int64_t c, double sum_dy, double sum_dy_xmu) {
      return kernels::gradient_coefficients<Acc>(means[c], invstds[c], affine.weight.load(c, 1),
                                                 sum_dy, sum_dy_xmu, total);
    };

    if (!peers && !sizes.rows) {  // one channel after the other, while it is in the cache
      at::parallel_for(0, channels, grain(sizes.values_per_channel()), [&](int64_t b, int64_t e) {
        for (int64_t c = b; c < e; ++c) {
          kernels::ReduceResult sums{0, 0};
          if (reduces) {
            sums = k.planes_reduce(gradient, values, outputs, sizes.planes, c, forward_of(c), mask);
            sums.sum_dy_xmu = from_mean(c, sums.sum_dy, sums.sum_dy_xmu);
            store_parameters(c, sums.sum_dy, sums.sum_dy_xmu);
          }
          if (writes_elements) {
            k.planes_gradient(gradient, values, outputs, to_x, to_z, sizes.planes, c, forward_of(c),
                              backward_of(c, sums.sum_dy, sums.sum_dy_xmu), mask, stream);
          }
        }
      });
      return;
    }

    at::Tensor sums = at::zeros({2 * channels}, mean.options().dtype(at::kDouble));
    double* sum_dy = sums.mutable_data_ptr<double>();
    double* sum_dy_xmu = sum_dy + channels;
    if (reduces) {
      local_reduction(gradient, values, outputs, sizes, forward, mask, sum_dy, sum_dy_xmu);
      for (int64_t c = 0; c < channels; ++c) {
        sum_dy_xmu[c] = from_mean(c, sum_dy[c], sum_dy_xmu[c]);
        store_parameters(c, sum_dy[c], sum_dy_xmu[c]);
      }
    }
    if (peers) {
      all_reduce(peers, sums, Direction::kBackward, channels);
    }
    if (!writes_elements) {
      return;
    }
    if (!sizes.rows) {
      at::parallel_for(0, channels, grain(sizes.values_per_channel()), [&](int64_t b, int64_t e) {
        for (int64_t c = b; c < e; ++c) {
          k.planes_gradient(gradient, values, outputs, to_x, to_z, sizes.planes, c, forward_of(c),
                            backward_of(c, sum_dy[c], sum_dy_xmu[c]), mask, stream);
        }
      });
      return;
    }
    RowCoefficients<Acc> backward(channels);
    for (int64_t c = 0; c < channels; ++c) {
      const auto g = backward_of(c, sum_dy[c], sum_dy_xmu[c]);
      backward.set(c, g.dy_scale, g.x_scale, g.shift);
    }
    at::parallel_for(0, sizes.values_per_channel(), grain(channels), [&](int64_t b, int64_t e) {
      k.rows_gradient(gradient, values, outputs, to_x, to_z, b, e, channels, forward.columns,
                      backward.columns, mask, stream);
    });
  });
  return {dx, dz, dweight, dbias};
}

}  // namespace
}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, CPU, m) {
  m.impl("sync_batch_norm", &apex::parallel::detail::forward_cpu);
  m.impl("sync_batch_norm_backward", &apex::parallel::detail::backward_cpu);
  m.impl("batch_norm_inference", &apex::parallel::detail::inference_cpu);
}
