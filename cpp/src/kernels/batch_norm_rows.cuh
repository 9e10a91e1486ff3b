// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "batch_norm_device.cuh"

/// The channels-last kernels. A block works on a tile of channels over a range of rows. A thread
/// works on the same `kVector` channels in all its rows.

namespace apex::kernels {

/// The position of a thread in the plan.
struct RowsPlace {
  int64_t tile;
  int split;
  int x;
  int y;
  int64_t channel;  // the thread's first channel
  bool inside;      // whether its channels exist

  __device__ __forceinline__ RowsPlace(const RowsPlan& plan, int64_t block)
      : tile(block % plan.tiles),
        split(static_cast<int>(block / plan.tiles)),
        x(static_cast<int>(threadIdx.x) % plan.threads_x),
        y(static_cast<int>(threadIdx.x) / plan.threads_x),
        channel(tile * plan.tile_channels() + x * plan.vector),
        inside(channel < plan.channels) {}
};

/// Adds the sums of each channel of the tile over the rows of the block, and calls
/// give(channel, sums).
template <int kVector, typename F>
__device__ __forceinline__ void sum_rows(const RowsPlan& plan, const RowsPlace& place,
                                         Sums (&mine)[kVector], F&& give) {
  __shared__ Sums warps[kRowsThreads / 32][kMaxTileChannels];
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    for (int offset = plan.threads_x; offset < 32; offset *= 2) {
      mine[i].first += __shfl_xor_sync(0xffffffffu, mine[i].first, offset);
      mine[i].second += __shfl_xor_sync(0xffffffffu, mine[i].second, offset);
    }
    if (lane < plan.threads_x) {
      warps[threadIdx.x / 32][lane * kVector + i] = mine[i];
    }
  }
  __syncthreads();
  const int width = plan.tile_channels();
  for (int i = threadIdx.x; i < width; i += kRowsThreads) {
    const int64_t channel = place.tile * width + i;
    Sums all{0, 0};
    for (int warp = 0; warp < kRowsThreads / 32; ++warp) {
      all.first += warps[warp][i].first;
      all.second += warps[warp][i].second;
    }
    if (channel < plan.channels) {
      give(channel, all);
    }
  }
}

/// Calls f(offset, number of loads) until the thread has processed its rows: kLoads at a time, then
/// one at a time for the rest. The loads are plan.threads_y rows apart.
template <int kLoads, typename F>
__device__ __forceinline__ void walk(const RowsPlan& plan, const RowsPlace& place, F&& f) {
  const int64_t end = plan.end(place.split);
  int64_t row = plan.begin(place.split) + place.y;
  for (; row + (kLoads - 1) * plan.threads_y < end; row += kLoads * plan.threads_y) {
    f(row * plan.channels + place.channel, std::integral_constant<int, kLoads>{});
  }
  for (; row < end; row += plan.threads_y) {
    f(row * plan.channels + place.channel, std::integral_constant<int, 1>{});
  }
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kRowsThreads)
    rows_statistics_kernel(RowsPlan plan, Sums* partial, const T* __restrict__ x,
                           double* __restrict__ record, int64_t* num_batches) {
  using A = Acc<T>;
  const RowsPlace place(plan, blockIdx.x);
  begin_record(record, plan.channels, plan.rows, num_batches);
  A origin[kVector];
  A mean[kVector] = {};
  A m2[kVector] = {};
  A count = 0;
  if (place.inside && plan.rows > 0) {
    const Packed<T, kVector> first = load<T, kVector>(x + place.channel);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      origin[i] = widen(first.values[i]);
    }
    const int64_t step = plan.threads_y * plan.channels;
    walk<kLoadsInFlight>(plan, place, [&](int64_t at, auto loads) {
      constexpr int kLoads = decltype(loads)::value;
      Packed<T, kVector> in[kLoads];
#pragma unroll
      for (int r = 0; r < kLoads; ++r) {
        in[r] = load<T, kVector>(x + at + r * step);
      }
      const A total = count + A(kLoads);
      const A share = A(kLoads) / total;
      const A weight = count * share;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        A sum = 0;
#pragma unroll
        for (int r = 0; r < kLoads; ++r) {
          sum += widen(in[r].values[i]) - origin[i];
        }
        const A center = sum * (A(1) / A(kLoads));
        A squares = 0;
#pragma unroll
        for (int r = 0; r < kLoads; ++r) {
          const A d = widen(in[r].values[i]) - origin[i] - center;
          squares += d * d;
        }
        const A delta = center - mean[i];  // Chan's merge; all channels have the same shares
        mean[i] += delta * share;
        m2[i] += squares + delta * delta * weight;
      }
      count = total;
    });
  }
  Sums mine[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    mine[i] = to_moments(mean[i], m2[i], count);
  }
  sum_rows(plan, place, mine, [&](int64_t channel, const Sums& all) {
    const double start = plan.rows > 0 ? static_cast<double>(widen(x[channel])) : 0.0;
    give_statistics(all, start, static_cast<double>(plan.rows), channel, plan.channels, place.split,
                    plan.splits, partial, record);
  });
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kRowsThreads)
    rows_reduce_kernel(RowsPlan plan, Sums* partial, GradientArguments a) {
  using A = Acc<T>;
  const RowsPlace place(plan, blockIdx.x);
  Sums mine[kVector] = {};
  if (place.inside) {
    A high[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      high[i] = static_cast<A>(a.mean[place.channel + i]);
    }
    const T* x = static_cast<const T*>(a.x);
    const T* dy = static_cast<const T*>(a.dy);
    A sum[kVector] = {};
    A dot[kVector] = {};
    const int64_t step = plan.threads_y * plan.channels;
    walk<kLoadsInFlight>(plan, place, [&](int64_t at, auto loads) {
      constexpr int kLoads = decltype(loads)::value;
      Packed<T, kVector> g[kLoads], v[kLoads];
#pragma unroll
      for (int r = 0; r < kLoads; ++r) {
        g[r] = load<T, kVector>(dy + at + r * step);
        v[r] = load<T, kVector>(x + at + r * step);
      }
#pragma unroll
      for (int r = 0; r < kLoads; ++r) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const A d = widen(g[r].values[i]);
          sum[i] += d;
          dot[i] = fma(d, widen(v[r].values[i]) - high[i], dot[i]);
        }
      }
    });
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      mine[i] = {static_cast<double>(sum[i]), static_cast<double>(dot[i])};
    }
  }
  sum_rows(plan, place, mine, [&](int64_t channel, const Sums& all) {
    give_reduction(a, all, static_cast<double>(static_cast<A>(a.mean[channel])), channel,
                   plan.channels, place.split, plan.splits, partial);
  });
}

template <typename Arguments, typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads)
    rows_elementwise_kernel(RowsPlan plan, Arguments a) {
  using A = Acc<T>;
  using K = decltype(channel_coefficients<A>(a, 0, 0, false));
  // Back to front, because the reducing launch has just read the end, which may be in the cache.
  const RowsPlace place(plan, gridDim.x - 1 - static_cast<int64_t>(blockIdx.x));
  __shared__ K shared[kMaxTileChannels];
  const int width = plan.tile_channels();
  for (int i = threadIdx.x; i < width; i += kBlockThreads) {
    const int64_t channel = place.tile * width + i;
    if (channel < plan.channels)
      shared[i] = channel_coefficients<A>(a, plan.channels, channel, /*writes=*/place.split == 0);
  }
  __syncthreads();
  if (!place.inside) return;
  K k[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    k[i] = shared[place.x * kVector + i];
  }
  const T* x = static_cast<const T*>(a.x);
  T* out = static_cast<T*>(a.out);
  const int64_t step = plan.threads_y * plan.channels;
  walk<kLoadsInFlight>(plan, place, [&](int64_t at, auto loads) {
    constexpr int kLoads = decltype(loads)::value;
    Packed<T, kVector> v[kLoads], g[kLoads];
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      v[r] = load<T, kVector>(x + at + r * step);
      g[r] = load_gradient(a, at + r * step, v[r]);
    }
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      Packed<T, kVector> result;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        result.values[i] = static_cast<T>(k[i].of(widen(v[r].values[i]), widen(g[r].values[i])));
      }
      store<T, kVector>(out + at + r * step, result);
    }
  });
}

}  // namespace apex::kernels
