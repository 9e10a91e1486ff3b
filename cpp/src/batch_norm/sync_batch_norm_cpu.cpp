// SPDX-License-Identifier: BSD-3-Clause
// The batch-norm operators on the CPU. This file splits the work over threads, does the work per
// channel, and runs one collective per direction.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "batch_norm/sync_batch_norm_common.h"
#include "floating_point_mode.h"
#include "kernels/processor_cache.h"

namespace apex::parallel::detail {
namespace {

using kernels::ChannelParam;
using kernels::CpuKernels;
using kernels::ReluMask;
using kernels::Welford;

// With fewer elements than this, a thread costs more than it saves (at::parallel_for's usual
// grain).
constexpr int64_t kGrainElements = 32768;

int64_t grain(int64_t elements_per_item) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_per_item));
}

/// Whether a pass over `arrays` arrays of the size of `like` should write its result with
/// non-temporal stores. If the arrays are larger than half of the last-level cache, which other
/// code uses as well, the next reader will not find the result in the cache.
bool outgrows_cache(const at::Tensor& like, int arrays) {
  return like.nbytes() * static_cast<size_t>(arrays) > kernels::last_cache_bytes() / 2;
}

template <typename T>
const T* data_or_null(const OptionalTensor& tensor) {
  return present(tensor) ? tensor->const_data_ptr<T>() : nullptr;
}

/// The coefficients of all channels, one array per coefficient, as the row kernels take them.
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

/// Splits the rows into parts. Runs part(begin, end, sums) for all parts in parallel, each with its
/// own zeroed sums[2 * channels]. Then runs combine(begin, end, sums) for the parts one by one, in
/// row order.
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

/// Mean and 1 / standard deviation of all channels, converted once.
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

/// The output arrays for the statistics of a batch.
struct KeptStatistics {
  double* mean;
  double* invstd;
  ChannelParam running_mean, running_var;
  double factor, eps;

  void keep(int64_t c, const Welford<double>& all) const {
    mean[c] = all.mean;
    invstd[c] = kernels::inverse_deviation(all, eps);
    running_mean.store(c, kernels::update_running_mean(running_mean.load(c, 0), all, factor));
    running_var.store(c, kernels::update_running_var(running_var.load(c, 0), all, factor));
  }
};

/// Merges the statistics of all ranks. `record` holds those of this rank. Returns the number of
/// values per channel over all ranks.
int64_t merge_statistics(const at::Tensor& input, const ForwardCall& call, const at::Tensor& record,
                         const KeptStatistics& kept) {
  const int64_t channels = call.sizes.planes.channels;
  const at::Tensor gathered = call.peers ? gather_statistics(call.peers, record, channels) : record;
  const int64_t ranks = gathered.numel() / kernels::statistics_length(channels);
  const double* records = gathered.const_data_ptr<double>();
  double total = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    total += records[(rank + 1) * kernels::statistics_length(channels) - 1];
  }
  check_more_than_one_value(input, static_cast<int64_t>(total));
  const DefaultFloatingPointMode mode;  // every rank merges itself and uses the result
  for (int64_t c = 0; c < channels; ++c) {
    kept.keep(c, kernels::merge_ranks(records, ranks, channels, c));
  }
  return static_cast<int64_t>(total);
}

/// Returns the number of values per channel over all ranks.
template <typename T>
int64_t forward_as(const ForwardArguments& a, const ForwardCall& call, const KeptStatistics& kept) {
  using Acc = typename CpuKernels<T>::Acc;
  const Sizes& sizes = call.sizes;
  const int64_t channels = sizes.planes.channels;
  const int64_t values = sizes.values_per_channel();
  const Affine affine{channel_param(a.weight), channel_param(a.bias)};
  const T* x = call.x.const_data_ptr<T>();
  const T* z = data_or_null<T>(call.z);
  T* y = call.output.mutable_data_ptr<T>();
  const bool stream = outgrows_cache(call.x, z != nullptr ? 3 : 2);
  if (!call.peers && !sizes.rows) {
    // No collective is needed, so each channel is normalized while it is still in the cache.
    const CpuKernels<T>& k = kernels::cpu_kernels<T>();
    at::parallel_for(0, channels, grain(values), [&](int64_t b, int64_t e) {
      for (int64_t c = b; c < e; ++c) {
        kept.keep(c, k.planes_statistics(x, sizes.planes, c));
        k.planes_normalize(x, z, y, sizes.planes, c,
                           affine.coefficients<Acc>(c, kept.mean[c], kept.invstd[c]), a.fuse_relu,
                           stream);
      }
    });
    return values;
  }
  at::Tensor record = at::empty({kernels::statistics_length(channels)}, call.mean.options());
  double* local = record.mutable_data_ptr<double>();
  local_statistics(x, sizes, local, local + channels);
  local[2 * channels] = static_cast<double>(values);
  const int64_t total = merge_statistics(a.input, call, record, kept);
  normalize(x, z, y, sizes, kept.mean, kept.invstd, affine, a.fuse_relu, stream);
  return total;
}

/// Every rank computes this itself: see Note [Floating-point modes].
double running_factor(const ForwardArguments& a, int64_t batches) {
  const DefaultFloatingPointMode mode;
  // volatile, so that it is computed before the mode is restored.
  const volatile double factor =
      kernels::running_factor(a.momentum.value_or(kernels::kNoMomentum), batches);
  return factor;
}

ForwardResult forward_cpu(const ForwardArguments& a) {
  const ForwardCall call(a);
  const int64_t batches = call.counter.defined() ? *call.counter.const_data_ptr<int64_t>() + 1 : 0;
  const KeptStatistics kept{
      call.mean.mutable_data_ptr<double>(), call.invstd.mutable_data_ptr<double>(),
      channel_param(a.running_mean),        channel_param(a.running_var),
      running_factor(a, batches),           a.eps};
  *call.count.mutable_data_ptr<int64_t>() = visit_element_type(
      a.input.scalar_type(), [&](auto tag) { return forward_as<decltype(tag)>(a, call, kept); });
  if (call.counter.defined()) {
    *call.counter.mutable_data_ptr<int64_t>() = batches;
    store_counter(a.num_batches_tracked, call.counter);
  }
  return call.results;
}

at::Tensor inference_cpu(const InferenceArguments& a) {
  const InferenceCall call(a);
  const LoadedStatistics statistics(
      channel_statistics(a.running_mean, a.running_var, /*constant=*/true, a.eps),
      call.sizes.planes.channels);
  visit_element_type(a.input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    normalize(call.x.const_data_ptr<T>(), data_or_null<T>(call.z),
              call.output.mutable_data_ptr<T>(), call.sizes, statistics.mean.data(),
              statistics.invstd.data(), Affine{channel_param(a.weight), channel_param(a.bias)},
              a.fuse_relu, outgrows_cache(call.x, present(call.z) ? 3 : 2));
  });
  return call.output;
}

/// Writes the sums of this rank to sum_dy[channels] and sum_dy_xmu[channels], which must be zero.
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

/// The backward for elements of type T.
template <typename T>
class BackwardOf {
 public:
  BackwardOf(const BackwardArguments& a, const BackwardCall& call)
      : call_(call),
        dy_(call.dy.const_data_ptr<T>()),
        x_(call.x.const_data_ptr<T>()),
        y_(data_or_null<T>(call.y)),
        dx_(call.dx.numel() > 0 ? call.dx.mutable_data_ptr<T>() : nullptr),
        dz_(call.dz.numel() > 0 ? call.dz.mutable_data_ptr<T>() : nullptr),
        statistics_(channel_statistics(a.mean, a.invstd_or_var, !call.training, a.eps), channels()),
        affine_{channel_param(a.weight), channel_param(a.bias)},
        total_(call.training ? static_cast<double>(*a.count->const_data_ptr<int64_t>()) : 0.0),
        stream_(outgrows_cache(call.x, 3)),
        forward_(channels()) {
    if (call.writes_elements && dx_ == nullptr) {  // the kernels always write dx
      unused_ = at::empty_like(call.x);
      dx_ = unused_.mutable_data_ptr<T>();
    }
    for (int64_t c = 0; c < channels(); ++c) {
      const auto f =
          affine_.template coefficients<Acc>(c, statistics_.mean[c], statistics_.invstd[c]);
      forward_.set(c, f.high, f.scale, f.shift);
    }
  }

  void run(const at::TensorOptions& float64) {
    if (!call_.peers && !call_.sizes.rows) return one_channel_after_the_other();
    at::Tensor sums = at::zeros({2 * channels()}, float64);
    double* const sum_dy = sums.mutable_data_ptr<double>();
    double* const sum_dy_xmu = sum_dy + channels();
    if (call_.reduces) {
      local_reduction(dy_, x_, y_, call_.sizes, forward_, call_.mask, sum_dy, sum_dy_xmu);
      for (int64_t c = 0; c < channels(); ++c) {
        const kernels::ReduceResult complete = finish(c, {sum_dy[c], sum_dy_xmu[c]});
        sum_dy_xmu[c] = complete.sum_dy_xmu;
      }
    }
    if (call_.peers) all_reduce(call_.peers, sums, Direction::kBackward, channels());
    if (call_.writes_elements) write(sum_dy, sum_dy_xmu);
  }

 private:
  using Acc = typename CpuKernels<T>::Acc;

  int64_t channels() const { return call_.sizes.planes.channels; }

  /// Reduces a channel and computes its gradients while it is still in the cache.
  void one_channel_after_the_other() {
    const kernels::Planes& planes = call_.sizes.planes;
    at::parallel_for(0, channels(), grain(values()), [&](int64_t b, int64_t e) {
      for (int64_t c = b; c < e; ++c) {
        kernels::ReduceResult sums{0, 0};
        if (call_.reduces) {
          sums = finish(c, k_.planes_reduce(dy_, x_, y_, planes, c, forward_of(c), call_.mask));
        }
        if (call_.writes_elements) {
          k_.planes_gradient(dy_, x_, y_, dx_, dz_, planes, c, forward_of(c),
                             backward_of(c, sums.sum_dy, sums.sum_dy_xmu), call_.mask, stream_);
        }
      }
    });
  }

  void write(const double* sum_dy, const double* sum_dy_xmu) {
    if (!call_.sizes.rows) {
      at::parallel_for(0, channels(), grain(values()), [&](int64_t b, int64_t e) {
        for (int64_t c = b; c < e; ++c) {
          k_.planes_gradient(dy_, x_, y_, dx_, dz_, call_.sizes.planes, c, forward_of(c),
                             backward_of(c, sum_dy[c], sum_dy_xmu[c]), call_.mask, stream_);
        }
      });
      return;
    }
    RowCoefficients<Acc> backward(channels());
    for (int64_t c = 0; c < channels(); ++c) {
      const auto g = backward_of(c, sum_dy[c], sum_dy_xmu[c]);
      backward.set(c, g.dy_scale, g.x_scale, g.shift);
    }
    at::parallel_for(0, values(), grain(channels()), [&](int64_t b, int64_t e) {
      k_.rows_gradient(dy_, x_, y_, dx_, dz_, b, e, channels(), forward_.columns, backward.columns,
                       call_.mask, stream_);
    });
  }

  /// Corrects the sums of a channel for the rounding of its mean, stores the gradients of its
  /// weight and bias, and returns the sums.
  kernels::ReduceResult finish(int64_t c, kernels::ReduceResult sums) const {
    // The kernels subtract only `high`, the rounded mean; the rest of the mean is subtracted here.
    sums.sum_dy_xmu -=
        (statistics_.mean[c] - static_cast<double>(forward_.columns[0][c])) * sums.sum_dy;
    call_.weight.store(c, sums.sum_dy_xmu * statistics_.invstd[c]);
    call_.bias.store(c, sums.sum_dy);
    return sums;
  }

  kernels::NormalizeCoefficients<Acc> forward_of(int64_t c) const {
    return {forward_.columns[0][c], forward_.columns[1][c], forward_.columns[2][c]};
  }

  kernels::GradientCoefficients<Acc> backward_of(int64_t c, double sum_dy,
                                                 double sum_dy_xmu) const {
    return kernels::gradient_coefficients<Acc>(statistics_.mean[c], statistics_.invstd[c],
                                               affine_.weight.load(c, 1), sum_dy, sum_dy_xmu,
                                               total_ > 0 ? 1.0 / total_ : 0.0);
  }

  int64_t values() const { return call_.sizes.values_per_channel(); }

  const CpuKernels<T>& k_ = kernels::cpu_kernels<T>();
  const BackwardCall& call_;
  const T* const dy_;
  const T* const x_;
  const T* const y_;
  T* dx_;
  T* const dz_;
  at::Tensor unused_;
  const LoadedStatistics statistics_;
  const Affine affine_;
  const double total_;
  const bool stream_;
  RowCoefficients<Acc> forward_;
};

BackwardResult backward_cpu(const BackwardArguments& a) {
  const BackwardCall call(a);
  visit_element_type(a.input.scalar_type(), [&](auto tag) {
    BackwardOf<decltype(tag)>(a, call).run(a.mean.options().dtype(at::kDouble));
  });
  return call.results;
}

}  // namespace
}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, CPU, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_cpu>);
  m.impl("sync_batch_norm_backward", &backward_kernel<&backward_cpu>);
  m.impl("batch_norm_inference", &inference_kernel<&inference_cpu>);
}
