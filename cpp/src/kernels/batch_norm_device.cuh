// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include "batch_norm_cuda.h"

/// Loads, block reductions and the "last block" rule of the CUDA kernels.

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

template <typename T>
using Acc = typename ElementwiseType<T>::type;

template <typename T>
__device__ __forceinline__ Acc<T> widen(T value) {
  return static_cast<Acc<T>>(value);
}

/// Adds n values to running sums of one thread by the corrected two-pass formula, all in registers.
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

/// Two sums that travel through warps, blocks and memory together.
struct Sums {
  double first;
  double second;
};

/// A thread's statistics as moments about the common origin: plain sums, which any number of
/// threads and blocks can add without a division. In float64, and about a value of the data, the
/// cancellation in `from_moments` costs nothing that float32 data has.
template <typename A>
__device__ __forceinline__ Sums to_moments(A mean, A m2, A count) {
  const double sum = static_cast<double>(mean) * static_cast<double>(count);
  return {sum, static_cast<double>(m2) + sum * static_cast<double>(mean)};
}

/// Writes one channel's mean and m2.
__device__ __forceinline__ void from_moments(const Sums& s, double origin, double count,
                                             double* mean, double* m2) {
  const double offset = count > 0 ? s.first / count : 0.0;
  const double squares = s.second - s.first * offset;
  *mean = count > 0 ? origin + offset : 0.0;
  *m2 = squares < 0 ? 0.0 : squares;  // keeps NaN
}

/// Right in the first warp only. blockDim.x is a multiple of 32.
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

/// Adds up what `splits` blocks left in `slots`. Called by the first warp.
__device__ __forceinline__ Sums warp_sum_slots(const double* slots, int splits) {
  Sums all{0, 0};
  for (int i = threadIdx.x; i < splits; i += 32) {
    all.first += __ldcg(slots + 2 * i);  // from the second-level cache: other blocks wrote it
    all.second += __ldcg(slots + 2 * i + 1);
  }
  return {warp_sum(all.first), warp_sum(all.second)};
}

/// True in every thread of the block that is the last of `blocks` to get here for this counter.
/// What the others wrote before is visible to it. atomicInc wraps the counter to zero with the
/// last one, so that it is ready for the next launch.
__device__ __forceinline__ bool is_last_block(unsigned* counter, unsigned blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicInc(counter, blocks - 1) == blocks - 1;
  }
  __syncthreads();
  __threadfence();
  return last;
}

/// How many threads merge the ranks' records of a channel together: a power of two, at most a warp.
__device__ __forceinline__ int lanes_per_channel(int64_t ranks) {
  int lanes = 1;
  while (lanes < 32 && lanes < ranks) {
    lanes *= 2;
  }
  return lanes;
}

/// One channel's statistics over all ranks, in each of the `lanes` neighbouring threads that merge
/// them. All lanes of the warp have to be here; those that have no channel pass a negative one.
__device__ __forceinline__ Welford<double> merge_records(const double* records, int64_t ranks,
                                                         int64_t channels, int64_t channel,
                                                         int lanes) {
  Welford<double> all;
  for (int64_t rank = threadIdx.x % lanes; rank < ranks && channel >= 0; rank += lanes) {
    const double* record = records + rank * statistics_length(channels);
    all.merge(record[channel], record[channels + channel], record[2 * channels]);
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    const double mean = __shfl_xor_sync(0xffffffffu, all.mean, offset);
    const double m2 = __shfl_xor_sync(0xffffffffu, all.m2, offset);
    const double count = __shfl_xor_sync(0xffffffffu, all.count, offset);
    all.merge(mean, m2, count);
  }
  return all;
}

/// What is done once per channel in the normalizing launch: statistics for the backward, and the
/// running ones.
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

/// What is done once per channel in the reducing launch. `all` is relative to `high`.
__device__ __forceinline__ void finish_reduction(const GradientArguments& a, int64_t channel,
                                                 int64_t channels, const Sums& all, double high) {
  const double sum_dy_xmu = all.second - (a.statistics.load_mean(channel) - high) * all.first;
  a.sums[channel] = all.first;
  a.sums[channels + channel] = sum_dy_xmu;
  a.dbias.store(channel, all.first);
  a.dweight.store(channel, sum_dy_xmu * a.statistics.load_invstd(channel));
}

template <typename A>
__device__ __forceinline__ NormalizeCoefficients<A> forward_coefficients(const GradientArguments& a,
                                                                         int64_t channel) {
  return normalize_coefficients<A>(a.statistics.load_mean(channel),
                                   a.statistics.load_invstd(channel), a.weight.load(channel, 1),
                                   a.bias.load(channel, 0));
}

template <typename A>
__device__ __forceinline__ GradientCoefficients<A> backward_coefficients(const GradientArguments& a,
                                                                         int64_t channel,
                                                                         int64_t channels) {
  const bool training = a.count != nullptr;
  return gradient_coefficients<A>(
      a.statistics.load_mean(channel), a.statistics.load_invstd(channel), a.weight.load(channel, 1),
      training ? a.sums[channel] : 0.0, training ? a.sums[channels + channel] : 0.0,
      training ? static_cast<double>(*a.count) : 0.0);
}

template <typename A>
__device__ __forceinline__ A relu(A value) {
  return value > A(0) || value != value ? value : A(0);
}

/// dy behind the ReLU.
template <typename A>
__device__ __forceinline__ A masked(ReluMask mask, A dy, A centered, A output,
                                    const NormalizeCoefficients<A>& k) {
  if (mask == ReluMask::kNone) {
    return dy;
  }
  const A value = mask == ReluMask::kOutput ? output : fma(centered, k.scale, k.shift);
  return value <= A(0) ? A(0) : dy;
}

}  // namespace apex::kernels
