// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "batch_norm_device.cuh"

/// Channels first: a block works on one channel.

namespace apex::kernels {

/// Adds the sums of the blocks that share a channel. False in every block but the last, which has
/// the total in its first warp.
__device__ __forceinline__ bool merge_splits(const PlanesPlan& plan, int64_t channel, int split,
                                             double* partial, unsigned* counters, Sums& all) {
  if (plan.splits == 1) {
    return true;
  }
  double* slots = partial + channel * plan.splits * 2;
  if (threadIdx.x == 0) {
    slots[2 * split] = all.first;
    slots[2 * split + 1] = all.second;
  }
  if (!is_last_block(counters + channel, plan.splits)) {
    return false;
  }
  if (threadIdx.x < 32) {
    all = warp_sum_slots(slots, plan.splits);
  }
  return true;
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads)
    planes_statistics_kernel(PlanesPlan plan, const T* __restrict__ x, double* __restrict__ record,
                             double* partial, unsigned* counters, int64_t* num_batches) {
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
  // Everything is measured from the channel's first value: small numbers keep their digits.
  const A origin = plan.units > 0 ? widen(x[channel * plan.sizes.plane]) : A(0);
  Welford<A> mine;
  PlaneCursor cursor(plan, split, threadIdx.x);
  while (cursor.unit + (kLoadsInFlight - 1) * int64_t{plan.threads} < cursor.end) {
    Packed<T, kVector> in[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      in[i] = load<T, kVector>(x + cursor.offset(plan, channel));
      cursor.advance(plan);
    }
    A values[kLoadsInFlight * kVector];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight * kVector; ++i) {
      values[i] = widen(in[i / kVector].values[i % kVector]) - origin;
    }
    merge_registers(mine, values);
  }
  for (; cursor.valid(); cursor.advance(plan)) {
    const Packed<T, kVector> in = load<T, kVector>(x + cursor.offset(plan, channel));
    A values[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[i] = widen(in.values[i]) - origin;
    }
    merge_registers(mine, values);
  }
  Sums all = block_sum(to_moments(mine.mean, mine.m2, mine.count));
  if (!merge_splits(plan, channel, split, partial, counters, all)) {
    return;
  }
  if (threadIdx.x == 0) {
    from_moments(all, static_cast<double>(origin),
                 static_cast<double>(plan.sizes.batch * plan.sizes.plane), record + channel,
                 record + channels + channel);
  }
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads)
    planes_normalize_kernel(PlanesPlan plan, NormalizeArguments a) {
  using A = Acc<T>;
  // Back to front: the statistics launch has just read the end, which may still be in the cache.
  const int64_t block = gridDim.x - 1 - static_cast<int64_t>(blockIdx.x);
  const int64_t channel = block / plan.splits;
  const int split = static_cast<int>(block % plan.splits);
  __shared__ NormalizeCoefficients<A> shared;
  if (threadIdx.x < 32) {
    double mean, invstd;
    if (a.records != nullptr) {
      const Welford<double> all = merge_records(a.records, a.ranks, plan.sizes.channels, channel,
                                                lanes_per_channel(a.ranks));
      mean = all.mean;
      invstd = inverse_deviation(all, a.eps);
      if (split == 0 && threadIdx.x == 0) {
        finish_channel(a, channel, all, invstd);
      }
    } else {
      mean = a.constants().load_mean(channel);
      invstd = a.constants().load_invstd(channel);
    }
    if (threadIdx.x == 0) {
      shared = normalize_coefficients<A>(mean, invstd, a.weight.load(channel, 1),
                                         a.bias.load(channel, 0));
    }
  }
  __syncthreads();
  const NormalizeCoefficients<A> k = shared;
  const T* x = static_cast<const T*>(a.x);
  const T* z = static_cast<const T*>(a.z);
  T* y = static_cast<T*>(a.y);
  const auto apply = [&](const Packed<T, kVector>& in, int64_t at) {
    Packed<T, kVector> added, out;
    if (z != nullptr) {
      added = load<T, kVector>(z + at);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      A value = fma(widen(in.values[i]) - k.high, k.scale, k.shift);
      if (z != nullptr) {
        value += widen(added.values[i]);
      }
      out.values[i] = static_cast<T>(a.relu ? relu(value) : value);
    }
    store<T, kVector>(y + at, out);
  };
  PlaneCursor cursor(plan, split, threadIdx.x);
  while (cursor.unit + (kLoadsInFlight - 1) * int64_t{plan.threads} < cursor.end) {
    Packed<T, kVector> in[kLoadsInFlight];
    int64_t at[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      at[i] = cursor.offset(plan, channel);
      in[i] = load<T, kVector>(x + at[i]);
      cursor.advance(plan);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      apply(in[i], at[i]);
    }
  }
  for (; cursor.valid(); cursor.advance(plan)) {
    const int64_t at = cursor.offset(plan, channel);
    apply(load<T, kVector>(x + at), at);
  }
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads)
    planes_reduce_kernel(PlanesPlan plan, GradientArguments a, double* partial,
                         unsigned* counters) {
  using A = Acc<T>;
  const int64_t channel = blockIdx.x / plan.splits;
  const int split = static_cast<int>(blockIdx.x % plan.splits);
  const int64_t channels = plan.sizes.channels;
  __shared__ NormalizeCoefficients<A> shared;
  if (threadIdx.x == 0) {
    shared = forward_coefficients<A>(a, channel);
  }
  __syncthreads();
  const NormalizeCoefficients<A> k = shared;
  const T* x = static_cast<const T*>(a.x);
  const T* dy = static_cast<const T*>(a.dy);
  const T* y = static_cast<const T*>(a.mask == ReluMask::kOutput ? a.y : a.x);
  A sum = 0, dot = 0;
  const auto add = [&](const Packed<T, kVector>& g, const Packed<T, kVector>& v, int64_t at) {
    Packed<T, kVector> out = v;
    if (a.mask == ReluMask::kOutput) {
      out = load<T, kVector>(y + at);
    }
    A part = 0, part_dot = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const A centered = widen(v.values[i]) - k.high;
      const A d = masked(a.mask, widen(g.values[i]), centered, widen(out.values[i]), k);
      part += d;
      part_dot = fma(d, centered, part_dot);
    }
    sum += part;
    dot += part_dot;
  };
  PlaneCursor cursor(plan, split, threadIdx.x);
  while (cursor.unit + (kLoadsInFlight - 1) * int64_t{plan.threads} < cursor.end) {
    Packed<T, kVector> g[kLoadsInFlight], v[kLoadsInFlight];
    int64_t at[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      at[i] = cursor.offset(plan, channel);
      g[i] = load<T, kVector>(dy + at[i]);
      v[i] = load<T, kVector>(x + at[i]);
      cursor.advance(plan);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      add(g[i], v[i], at[i]);
    }
  }
  for (; cursor.valid(); cursor.advance(plan)) {
    const int64_t at = cursor.offset(plan, channel);
    add(load<T, kVector>(dy + at), load<T, kVector>(x + at), at);
  }
  Sums all = block_sum({static_cast<double>(sum), static_cast<double>(dot)});
  if (!merge_splits(plan, channel, split, partial, counters, all)) {
    return;
  }
  if (threadIdx.x == 0) {
    finish_reduction(a, channel, channels, all, static_cast<double>(k.high));
  }
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kBlockThreads)
    planes_gradient_kernel(PlanesPlan plan, GradientArguments a) {
  using A = Acc<T>;
  const int64_t block = gridDim.x - 1 - static_cast<int64_t>(blockIdx.x);
  const int64_t channel = block / plan.splits;
  const int split = static_cast<int>(block % plan.splits);
  __shared__ NormalizeCoefficients<A> forward;
  __shared__ GradientCoefficients<A> backward;
  if (threadIdx.x == 0) {
    forward = forward_coefficients<A>(a, channel);
    backward = backward_coefficients<A>(a, channel, plan.sizes.channels);
  }
  __syncthreads();
  const NormalizeCoefficients<A> k = forward;
  const GradientCoefficients<A> b = backward;
  const T* x = static_cast<const T*>(a.x);
  const T* dy = static_cast<const T*>(a.dy);
  const T* y = static_cast<const T*>(a.y);
  T* dx = static_cast<T*>(a.dx);
  T* dz = static_cast<T*>(a.dz);
  const auto apply = [&](const Packed<T, kVector>& g, const Packed<T, kVector>& v, int64_t at) {
    Packed<T, kVector> out = v, to_x, to_z;
    if (a.mask == ReluMask::kOutput) {
      out = load<T, kVector>(y + at);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const A centered = widen(v.values[i]) - b.high;
      const A d = masked(a.mask, widen(g.values[i]), centered, widen(out.values[i]), k);
      to_x.values[i] = static_cast<T>(fma(d, b.dy_scale, fma(centered, b.x_scale, b.shift)));
      to_z.values[i] = static_cast<T>(d);
    }
    if (dx != nullptr) {
      store<T, kVector>(dx + at, to_x);
    }
    if (dz != nullptr) {
      store<T, kVector>(dz + at, to_z);
    }
  };
  PlaneCursor cursor(plan, split, threadIdx.x);
  while (cursor.unit + (kLoadsInFlight - 1) * int64_t{plan.threads} < cursor.end) {
    Packed<T, kVector> g[kLoadsInFlight], v[kLoadsInFlight];
    int64_t at[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      at[i] = cursor.offset(plan, channel);
      g[i] = load<T, kVector>(dy + at[i]);
      v[i] = load<T, kVector>(x + at[i]);
      cursor.advance(plan);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      apply(g[i], v[i], at[i]);
    }
  }
  for (; cursor.valid(); cursor.advance(plan)) {
    const int64_t at = cursor.offset(plan, channel);
    apply(load<T, kVector>(dy + at), load<T, kVector>(x + at), at);
  }
}

}  // namespace apex::kernels
