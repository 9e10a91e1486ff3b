// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "batch_norm_cuda.h"

/// Device functions that the CUDA kernels share: loads, block reductions, and the arithmetic per
/// channel.

namespace apex::kernels {

template <typename T, int kVector>
struct alignas(sizeof(T) * kVector) Packed {
  T values[kVector];
};

template <typename T, int kVector>
__device__ __forceinline__ Packed<T, kVector> load(const T* p) {
  return *reinterpret_cast<const Packed<T, kVector>*>(p);
}

template <typename T, int kVector>
__device__ __forceinline__ void store(T* p, const Packed<T, kVector>& packed) {
  *reinterpret_cast<Packed<T, kVector>*>(p) = packed;
}

/// The type in which elements are computed.
template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__device__ __forceinline__ Acc<T> widen(T value) {
  return static_cast<Acc<T>>(value);
}

/// Merges kCount values into the statistics of one thread by a two-pass formula, all in registers.
template <typename A, int kCount>
__device__ __forceinline__ void merge_registers(Welford<A>& all, const A (&values)[kCount]) {
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum += values[i];
  }
  const A mean = sum * (A(1) / A(kCount));
  A m2 = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const A d = values[i] - mean;
    m2 += d * d;
  }
  all.merge(mean, m2, A(kCount));
}

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

/// Two sums that are reduced together.
struct Sums {
  double first;
  double second;
};

/// A thread's statistics as moments about the common origin. Moments are plain sums, which threads
/// and blocks add without a division. They are float64 and the origin is a value of the data, so
/// the cancellation in `from_moments` costs none of the precision of float32 data.
template <typename A>
__device__ __forceinline__ Sums to_moments(A mean, A m2, A count) {
  const double sum = static_cast<double>(mean) * static_cast<double>(count);
  return {sum, static_cast<double>(m2) + sum * static_cast<double>(mean)};
}

/// What one thread of the statistics launch does besides.
__device__ __forceinline__ void begin_record(double* record, int64_t channels, int64_t count,
                                             int64_t* num_batches) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  record[2 * channels] = static_cast<double>(count);
  if (num_batches != nullptr) *num_batches += 1;
}

/// Writes one channel's mean and m2.
__device__ __forceinline__ void from_moments(const Sums& s, double origin, double count,
                                             double* mean, double* m2) {
  const double offset = count > 0 ? s.first / count : 0.0;
  const double squares = s.second - s.first * offset;
  *mean = count > 0 ? origin + offset : 0.0;
  *m2 = squares < 0 ? 0.0 : squares;  // keeps NaN
}

/// Sums over the block. Only the first warp gets the result. blockDim.x must be a multiple of 32.
__device__ __forceinline__ Sums block_sum(Sums s) {
  __shared__ Sums warps[32];
  s = {warp_sum(s.first), warp_sum(s.second)};
  if (threadIdx.x % 32 == 0) {
    warps[threadIdx.x / 32] = s;
  }
  __syncthreads();
  Sums all{0, 0};
  if (threadIdx.x < blockDim.x / 32) {
    all = warps[threadIdx.x];
  }
  return threadIdx.x < 32 ? Sums{warp_sum(all.first), warp_sum(all.second)} : all;
}

// Note [Float64 in every block]
// Every block computes the coefficients of its channels in float64 before it processes an element.
// GPUs for graphics and inference have one float64 unit per 32 or 64 float32 units. On them a
// float64 division or square root takes as long as several hundred float32 instructions. So code
// that every block runs uses neither. Code that runs in one block per channel may use both.

/// 1 / x with an error of at most 2 ulp, for x > 0 that is a normal number in float32; 0 for 0.
/// Uses a float32 estimate and two Newton steps.
__device__ __forceinline__ double fast_reciprocal(double x) {
  double r = x > 0 ? static_cast<double>(1.0f / static_cast<float>(x)) : 0.0;
  r = r * fma(-x, r, 2.0);
  return r * fma(-x, r, 2.0);
}

/// 1 / sqrt(x) by the same method for 1e-30 < x < 1e30. Uses float64 functions for other numbers.
__device__ __forceinline__ double fast_rsqrt(double x) {
  if (!(x > 1e-30 && x < 1e30)) {
    return 1.0 / sqrt(x);
  }
  double r = static_cast<double>(1.0f / sqrtf(static_cast<float>(x)));
  r = r * fma(-0.5 * x * r, r, 1.5);
  return r * fma(-0.5 * x * r, r, 1.5);
}

/// Merges the records of a channel. It computes the mean first, then the deviations from it. That
/// is as accurate as pairwise merges, and takes one reciprocal.
__device__ __forceinline__ Welford<double> merge_records(const double* records, int64_t ranks,
                                                         int64_t channels, int64_t channel) {
  const int64_t length = statistics_length(channels);
  const double* const end = records + ranks * length;
  Welford<double> all;
#pragma unroll 4
  for (const double* record = records; record < end; record += length) {
    all.count += record[2 * channels];
    all.mean = fma(record[2 * channels], record[channel], all.mean);
  }
  all.mean *= fast_reciprocal(all.count);
#pragma unroll 4
  for (const double* record = records; record < end; record += length) {
    const double delta = record[channel] - all.mean;
    all.m2 += fma(record[2 * channels] * delta, delta, record[channels + channel]);
  }
  return all;
}

/// The work per channel in the normalizing launch: writes the statistics for backward, and updates
/// the running statistics.
__device__ __forceinline__ void finish_channel(const NormalizeArguments& a, int64_t channel,
                                               const Welford<double>& all, double invstd) {
  a.mean[channel] = all.mean;
  a.invstd[channel] = invstd;
  if (channel == 0) {
    *a.count = static_cast<int64_t>(all.count);
  }
  const double factor = running_factor(a.momentum, a.num_batches != nullptr ? *a.num_batches : 0);
  a.running_mean.store(channel, update_running_mean(a.running_mean.load(channel, 0), all, factor));
  a.running_var.store(channel, update_running_var(a.running_var.load(channel, 0), all, factor));
}

/// The work per channel in the reducing launch, of the sums of dy and dy * (x - mean).
__device__ __forceinline__ void finish_reduction(const GradientArguments& a, int64_t channel,
                                                 int64_t channels, const Sums& all) {
  a.sums[channel] = all.first;
  a.sums[channels + channel] = all.second;
  a.dbias.store(channel, all.first);
  a.dweight.store(channel, all.second * a.invstd[channel]);
}

// Note [Blocks that share a channel]
// Each writes its sums to `partial` [channels][splits], and a launch of its own adds them: one warp
// per channel. A channel with one block is finished by that block.

/// The part of the statistics launch after a block's sums of a channel, which are moments about
/// `origin`. Until the sums are added, the record holds the origin in the place of the mean.
__device__ __forceinline__ void give_statistics(const Sums& sums, double origin, double count,
                                                int64_t channel, int64_t channels, int split,
                                                int splits, Sums* partial, double* record) {
  if (splits > 1) {
    partial[channel * splits + split] = sums;
    if (split == 0) record[channel] = origin;
  } else {
    from_moments(sums, origin, count, record + channel, record + channels + channel);
  }
}

/// The same in the reducing launch. The second sum is with x - high.
__device__ __forceinline__ void give_reduction(const GradientArguments& a, Sums sums, double high,
                                               int64_t channel, int64_t channels, int split,
                                               int splits, Sums* partial) {
  sums.second -= (a.mean[channel] - high) * sums.first;
  if (splits > 1) {
    partial[channel * splits + split] = sums;
  } else {
    finish_reduction(a, channel, channels, sums);
  }
}

/// Adds the sums of each channel, and calls finish(channel, sums) in one thread of its warp.
template <typename F>
__device__ __forceinline__ void merge_splits(int64_t channels, int splits, const Sums* partial,
                                             F&& finish) {
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  Sums all{0, 0};
  for (int i = lane; channel < channels && i < splits; i += 32) {
    all.first += partial[channel * splits + i].first;
    all.second += partial[channel * splits + i].second;
  }
  all = {warp_sum(all.first), warp_sum(all.second)};
  if (channel < channels && lane == 0) finish(channel, all);
}

// What the elementwise launches compute, by their arguments: the coefficients of a channel, and
// whether they read a gradient. `writes` selects the single thread of the launch that writes the
// channel's statistics.

template <typename A>
__device__ __forceinline__ NormalizeCoefficients<A> channel_coefficients(
    const NormalizeArguments& a, int64_t channels, int64_t channel, bool writes) {
  const Welford<double> all = merge_records(a.records, a.ranks, channels, channel);
  const double invstd = fast_rsqrt(fma(all.m2, fast_reciprocal(all.count), a.eps));
  if (writes) finish_channel(a, channel, all, invstd);
  return normalize_coefficients<A>(all.mean, invstd, a.weight.load(channel, 1),
                                   a.bias.load(channel, 0));
}

template <typename A>
__device__ __forceinline__ GradientCoefficients<A> channel_coefficients(const GradientArguments& a,
                                                                        int64_t channels,
                                                                        int64_t channel, bool) {
  return gradient_coefficients<A>(a.mean[channel], a.invstd[channel], a.weight.load(channel, 1),
                                  a.sums[channel], a.sums[channels + channel],
                                  fast_reciprocal(static_cast<double>(*a.count)));
}

/// The gradients beside elements `x`, which a normalizing launch does not read.
template <typename T, int kVector>
__device__ __forceinline__ Packed<T, kVector> load_gradient(const NormalizeArguments&, int64_t,
                                                            const Packed<T, kVector>& x) {
  return x;
}
template <typename T, int kVector>
__device__ __forceinline__ Packed<T, kVector> load_gradient(const GradientArguments& a, int64_t at,
                                                            const Packed<T, kVector>&) {
  return load<T, kVector>(static_cast<const T*>(a.dy) + at);
}

}  // namespace apex::kernels
