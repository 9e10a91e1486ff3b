// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "batch_norm_device.cuh"

/// The channels-first kernels. A block works on one channel.

namespace apex::kernels {

/// Calls f(number of loads) until the thread has processed its units: kLoads at a time, then one at
/// a time for the rest.
template <int kLoads, typename F>
__device__ __forceinline__ void walk(const PlanesPlan& plan, PlaneCursor& cursor, F&& f) {
  while (cursor.unit + (kLoads - 1) * int64_t{plan.threads} < cursor.end) {
    f(std::integral_constant<int, kLoads>{});
  }
  while (cursor.valid()) {
    f(std::integral_constant<int, 1>{});
  }
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads)
    planes_statistics_kernel(PlanesPlan plan, Sums* partial, const T* __restrict__ x,
                             double* __restrict__ record, int64_t* num_batches) {
  using A = Acc<T>;
  const int64_t channel = blockIdx.x / plan.splits;
  const int split = static_cast<int>(blockIdx.x % plan.splits);
  const int64_t channels = plan.sizes.channels;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    record[2 * channels] = static_cast<double>(plan.sizes.batch * plan.sizes.plane);
    if (num_batches != nullptr) {
      *num_batches += 1;
    }
  }
  // All values are taken relative to the channel's first value, so that a large mean costs no
  // digits.
  const A origin = plan.units > 0 ? widen(x[channel * plan.sizes.plane]) : A(0);
  Welford<A> mine;
  PlaneCursor cursor(plan, split, threadIdx.x);
  walk<kLoadsInFlight>(plan, cursor, [&](auto loads) {
    constexpr int kLoads = decltype(loads)::value;
    Packed<T, kVector> in[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      in[i] = load<T, kVector>(x + cursor.offset(plan, channel));
      cursor.advance(plan);
    }
    A values[kLoads * kVector];
#pragma unroll
    for (int i = 0; i < kLoads * kVector; ++i) {
      values[i] = widen(in[i / kVector].values[i % kVector]) - origin;
    }
    merge_registers(mine, values);
  });
  const Sums all = block_sum(to_moments(mine.mean, mine.m2, mine.count));
  if (threadIdx.x == 0) {
    give_statistics(all, static_cast<double>(origin),
                    static_cast<double>(plan.sizes.batch * plan.sizes.plane), channel, channels,
                    split, plan.splits, partial, record);
  }
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads, 2)
    planes_normalize_kernel(PlanesPlan plan, NormalizeArguments a) {
  using A = Acc<T>;
  // Back to front, because the statistics launch has just read the end, which may be in the cache.
  const int64_t block = gridDim.x - 1 - static_cast<int64_t>(blockIdx.x);
  const int64_t channel = block / plan.splits;
  const int split = static_cast<int>(block % plan.splits);
  __shared__ NormalizeCoefficients<A> shared;
  if (threadIdx.x < 32) {
    const NormalizeCoefficients<A> mine =
        normalize_channel<A>(a, plan.sizes.channels, channel, lanes_per_channel(a.ranks),
                             split == 0 && threadIdx.x == 0);
    if (threadIdx.x == 0) {
      shared = mine;
    }
  }
  __syncthreads();
  const NormalizeCoefficients<A> k = shared;
  const T* x = static_cast<const T*>(a.x);
  T* y = static_cast<T*>(a.y);
  PlaneCursor cursor(plan, split, threadIdx.x);
  walk<kLoadsInFlight>(plan, cursor, [&](auto loads) {
    constexpr int kLoads = decltype(loads)::value;
    Packed<T, kVector> in[kLoads];
    int64_t at[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      at[i] = cursor.offset(plan, channel);
      in[i] = load<T, kVector>(x + at[i]);
      cursor.advance(plan);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Packed<T, kVector> out;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        out.values[j] = static_cast<T>(fma(widen(in[i].values[j]) - k.high, k.scale, k.shift));
      }
      store<T, kVector>(y + at[i], out);
    }
  });
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads, 2)
    planes_reduce_kernel(PlanesPlan plan, Sums* partial, GradientArguments a) {
  using A = Acc<T>;
  const int64_t channel = blockIdx.x / plan.splits;
  const int split = static_cast<int>(blockIdx.x % plan.splits);
  const int64_t channels = plan.sizes.channels;
  const A high = static_cast<A>(a.mean[channel]);
  const T* x = static_cast<const T*>(a.x);
  const T* dy = static_cast<const T*>(a.dy);
  A sum = 0, dot = 0;
  PlaneCursor cursor(plan, split, threadIdx.x);
  walk<kLoadsInFlight>(plan, cursor, [&](auto loads) {
    constexpr int kLoads = decltype(loads)::value;
    Packed<T, kVector> g[kLoads], v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = cursor.offset(plan, channel);
      g[i] = load<T, kVector>(dy + at);
      v[i] = load<T, kVector>(x + at);
      cursor.advance(plan);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      A part = 0, part_dot = 0;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const A d = widen(g[i].values[j]);
        part += d;
        part_dot = fma(d, widen(v[i].values[j]) - high, part_dot);
      }
      sum += part;
      dot += part_dot;
    }
  });
  const Sums all = block_sum({static_cast<double>(sum), static_cast<double>(dot)});
  if (threadIdx.x == 0) {
    give_reduction(a, all, static_cast<double>(high), channel, channels, split, plan.splits,
                   partial);
  }
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads, 2)
    planes_gradient_kernel(PlanesPlan plan, GradientArguments a) {
  using A = Acc<T>;
  const int64_t block = gridDim.x - 1 - static_cast<int64_t>(blockIdx.x);
  const int64_t channel = block / plan.splits;
  const int split = static_cast<int>(block % plan.splits);
  __shared__ GradientCoefficients<A> shared;
  if (threadIdx.x == 0) {
    shared = gradient_channel<A>(a, channel, plan.sizes.channels);
  }
  __syncthreads();
  const GradientCoefficients<A> b = shared;
  const T* x = static_cast<const T*>(a.x);
  const T* dy = static_cast<const T*>(a.dy);
  T* dx = static_cast<T*>(a.dx);
  PlaneCursor cursor(plan, split, threadIdx.x);
  walk<kLoadsInFlight>(plan, cursor, [&](auto loads) {
    constexpr int kLoads = decltype(loads)::value;
    Packed<T, kVector> g[kLoads], v[kLoads];
    int64_t at[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      at[i] = cursor.offset(plan, channel);
      g[i] = load<T, kVector>(dy + at[i]);
      v[i] = load<T, kVector>(x + at[i]);
      cursor.advance(plan);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Packed<T, kVector> out;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const A centered = widen(v[i].values[j]) - b.high;
        out.values[j] = static_cast<T>(
            fma(widen(g[i].values[j]), b.dy_scale, fma(centered, b.x_scale, b.shift)));
      }
      store<T, kVector>(dx + at[i], out);
    }
  });
}

}  // namespace apex::kernels
