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
  begin_record(record, channels, plan.sizes.batch * plan.sizes.plane, num_batches);
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

template <typename Arguments, typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads, 2)
    planes_elementwise_kernel(PlanesPlan plan, Arguments a) {
  using A = Acc<T>;
  using K = decltype(channel_coefficients<A>(a, 0, 0, false));
  // Back to front, because the reducing launch has just read the end, which may be in the cache.
  const int64_t block = gridDim.x - 1 - static_cast<int64_t>(blockIdx.x);
  const int64_t channel = block / plan.splits;
  const int split = static_cast<int>(block % plan.splits);
  __shared__ K shared;
  if (threadIdx.x == 0)
    shared = channel_coefficients<A>(a, plan.sizes.channels, channel, /*writes=*/split == 0);
  __syncthreads();
  const K k = shared;
  const T* x = static_cast<const T*>(a.x);
  T* out = static_cast<T*>(a.out);
  PlaneCursor cursor(plan, split, threadIdx.x);
  walk<kLoadsInFlight>(plan, cursor, [&](auto loads) {
    constexpr int kLoads = decltype(loads)::value;
    Packed<T, kVector> v[kLoads], g[kLoads];
    int64_t at[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      at[i] = cursor.offset(plan, channel);
      v[i] = load<T, kVector>(x + at[i]);
      g[i] = load_gradient(a, at[i], v[i]);
      cursor.advance(plan);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Packed<T, kVector> result;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        result.values[j] = static_cast<T>(k.of(widen(v[i].values[j]), widen(g[i].values[j])));
      }
      store<T, kVector>(out + at[i], result);
    }
  });
}

}  // namespace apex::kernels
