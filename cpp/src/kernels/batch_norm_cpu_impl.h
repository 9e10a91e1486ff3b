// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>

#include "batch_norm_cpu_vec.h"

/// The bodies of CpuKernels, included by one source per instruction set.

namespace apex::kernels {
inline namespace APEX_CPU_VARIANT {

// Note [Chunks]
// Deviations are taken from a shift near the mean. For the first chunk of planes the shift is the
// mean of the first few values. If that is too far from the mean of the chunk, the sums are
// computed again with the chunk's mean. The first chunk of rows is short and is read twice: for its
// mean, and then, from the first-level cache, for the deviations from it. Every later chunk is read
// once. Its shift is the mean of all values before it, which are at least as many. That is accurate
// enough: see Note [Error of the statistics], which also explains why the chunk size is limited.
constexpr int64_t kChunkElements = 4096;
constexpr int64_t kFirstRows = 32;
constexpr int64_t kChunkRows = 128;

/// Calls full(offset) for the whole packs of [0, n), then tail(offset, elements) for the rest.
template <int64_t kWidth, typename Full, typename Tail>
inline void for_each_pack(int64_t n, const Full& full, const Tail& tail) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    full(i);
  }
  if (i < n) {
    tail(i, n - i);
  }
}

/// Like for_each_pack(), for a plane: see Note [The end of a plane].
template <int64_t kWidth, typename Full, typename Short>
inline void for_each_pack_of_plane(int64_t n, const Full& full, const Short& shorter) {
  if (n < kWidth) {
    if (n > 0) {
      shorter(n);
    }
    return;
  }
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    full(i);
  }
  if (i < n) {
    full(n - kWidth);
  }
}

// Note [The end of a plane]
// If the length of a plane is not a multiple of the pack width, the last pack is aligned to the end
// of the plane and overlaps the pack before it. Writing the same results twice is harmless. In
// sums, the lanes that were already counted get the factor zero. A plane shorter than a pack is
// loaded and stored in part.

// ---- planes: [N, C, S], one channel ------------------------------------------------------------

// A plane of less than a page ends before the hardware prefetcher detects the stream, and the
// channel's next plane is not adjacent. So it needs a software prefetch.
constexpr int64_t kShortPlaneBytes = 4096;

/// Prefetches the pack `elements` after `p`. The address may be outside of the data. It is computed
/// with integers, because pointer arithmetic outside of an array is undefined.
template <typename T>
inline void prefetch(const T* p, int64_t elements) {
#if defined(__GNUC__)
  constexpr uintptr_t kLine = 64;
  const auto start = reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(elements) * sizeof(T);
  for (uintptr_t offset = 0; offset < Pack<T>::kWidth * sizeof(T); offset += kLine) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the address is not dereferenced
    __builtin_prefetch(reinterpret_cast<const void*>(start + offset));
  }
#endif
}

/// The prefetch distance of a pass over planes of this size, in elements; 0 for no prefetch.
template <typename T>
inline int64_t stride_ahead(Planes sizes) {
  return sizes.plane * static_cast<int64_t>(sizeof(T)) < kShortPlaneBytes
             ? sizes.channels * sizes.plane
             : 0;
}

struct ShiftedSums {
  double sum;
  double squares;
};

/// Sums the deviations from `shift`, and their squares, over `segments` runs of `length` elements,
/// `stride` apart.
template <typename T>
ShiftedSums shifted_sums(const T* x, int64_t stride, int64_t segments, int64_t length,
                         typename Pack<T>::Acc shift, int64_t ahead) {
  using P = Pack<T>;
  constexpr int64_t kWidth = P::kWidth;
  const P center = P::fill(shift);
  const P last = P::last_elements(length % kWidth);
  P sum0 = P::fill(0);
  P sum1 = P::fill(0);
  P square0 = P::fill(0);
  P square1 = P::fill(0);
  for (int64_t s = 0; s < segments; ++s) {
    const T* p = x + s * stride;
    const auto ask = [&](int64_t i) {
      if (ahead > 0) {
        prefetch(p, ahead + i);
        prefetch(p, ahead + i + kWidth);
      }
    };
    int64_t i = 0;
    for (; i + 2 * kWidth <= length; i += 2 * kWidth) {
      ask(i);
      const P d0 = P::load(p + i) - center;
      const P d1 = P::load(p + i + kWidth) - center;
      sum0 = sum0 + d0;
      sum1 = sum1 + d1;
      square0 = fma(d0, d0, square0);
      square1 = fma(d1, d1, square1);
    }
    const auto add = [&](const P& d) {
      sum0 = sum0 + d;
      square0 = fma(d, d, square0);
    };
    ask(i);
    for (; i + kWidth <= length; i += kWidth) {
      add(P::load(p + i) - center);
    }
    if (i < length) {
      add(length > kWidth ? (P::load(p + length - kWidth) - center) * last
                          : select(P::first_elements(length), P::load(p, length), center) - center);
    }
  }
  return {(sum0 + sum1).sum(), (square0 + square1).sum()};
}

/// Merges the statistics of one chunk into `all`: `segments` runs of `length` elements, `stride`
/// apart. See Note [Chunks].
template <typename T>
void chunk_statistics(const T* x, int64_t stride, int64_t segments, int64_t length, int64_t ahead,
                      Welford<double>& all) {
  using Acc = typename Pack<T>::Acc;
  constexpr int64_t kWidth = Pack<T>::kWidth;
  const double count = static_cast<double>(segments * length);
  Acc shift = static_cast<Acc>(all.mean);
  if (all.count < count) {
    // A power-of-two number of packs, so that the sum of equal values is exact.
    const int64_t sample = length >= 4 * kWidth   ? 4 * kWidth
                           : length >= 2 * kWidth ? 2 * kWidth
                                                  : std::min(kWidth, length);
    const double sum = shifted_sums(x, 0, 1, sample, Acc(0), 0).sum;
    shift = static_cast<Acc>(sum / static_cast<double>(sample));
  }
  ShiftedSums sums = shifted_sums(x, stride, segments, length, shift, ahead);
  const double offset = sums.sum / count;
  if (all.count < count && 2 * sums.sum * offset > sums.squares) {
    shift = static_cast<Acc>(static_cast<double>(shift) + offset);
    sums = shifted_sums(x, stride, segments, length, shift, 0);
  }
  all.merge_shifted(static_cast<double>(shift), sums.sum, sums.squares, count);
}

template <typename T>
Welford<double> planes_statistics(const T* x, Planes sizes, int64_t channel) {
  Welford<double> all;
  const int64_t plane = sizes.plane;
  const int64_t stride = sizes.channels * plane;
  const int64_t ahead = stride_ahead<T>(sizes);
  const T* first = x + channel * plane;
  for (int64_t n = 0, s = 0; plane > 0 && n < sizes.batch;) {
    const T* start = first + n * stride + s;
    if (s == 0 && plane <= kChunkElements) {  // several planes
      const int64_t segments = std::min(kChunkElements / plane, sizes.batch - n);
      chunk_statistics(start, stride, segments, plane, ahead, all);
      n += segments;
    } else {  // part of a plane
      const int64_t length = std::min(kChunkElements, plane - s);
      chunk_statistics(start, stride, 1, length, 0, all);
      s += length;
      if (s == plane) {
        s = 0;
        ++n;
      }
    }
  }
  return all;
}

// Note [Past the caches]
// A result that would leave the caches before it is read is written with non-temporal stores, where
// the processor has them. A normal store first fetches the cache line that it overwrites.
// Non-temporal stores need whole, aligned vectors and consecutive cache lines.

/// Whether non-temporal stores to `to` are possible. The first elements of two runs are `step`
/// elements apart.
template <typename T>
inline bool can_stream(const T* to, int64_t step) {
  constexpr int64_t kVector = static_cast<int64_t>(sizeof(Vec<float>));
  return to == nullptr || (reinterpret_cast<uintptr_t>(to) % kVector == 0 &&
                           step * static_cast<int64_t>(sizeof(T)) % kVector == 0);
}

/// Orders the non-temporal stores before all later stores.
inline void end_stream() {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  _mm_sfence();
#endif
}

template <typename T, bool kAdd, bool kRelu, Store kStore>
void planes_normalize_as(const T* x, const T* z, T* y, Planes sizes, int64_t channel,
                         NormalizeCoefficients<typename Pack<T>::Acc> k) {
  using P = Pack<T>;
  const P high = P::fill(k.high);
  const P scale = P::fill(k.scale);
  const P shift = P::fill(k.shift);
  const auto apply = [&](const P& value, const P& added) {
    P result = fma(value - high, scale, shift);
    if constexpr (kAdd) {
      result = result + added;
    }
    if constexpr (kRelu) {
      result = relu(result);
    }
    return result;
  };
  for (int64_t n = 0; n < sizes.batch; ++n) {
    const int64_t start = (n * sizes.channels + channel) * sizes.plane;
    const T* from = x + start;
    const T* plus = kAdd ? z + start : from;
    T* to = y + start;
    for_each_pack_of_plane<P::kWidth>(
        sizes.plane,
        [&](int64_t i) {
          apply(P::load(from + i), P::load(plus + i)).template store<kStore>(to + i);
        },
        [&](int64_t n) { apply(P::load(from, n), P::load(plus, n)).store(to, n); });
  }
}

template <typename T, bool kAdd, bool kRelu>
void planes_normalize_to(const T* x, const T* z, T* y, Planes sizes, int64_t channel,
                         NormalizeCoefficients<typename Pack<T>::Acc> k, bool stream) {
  if (stream && sizes.plane % Pack<T>::kWidth == 0 && can_stream(y, sizes.plane)) {
    planes_normalize_as<T, kAdd, kRelu, Store::kStream>(x, z, y, sizes, channel, k);
    end_stream();
  } else {
    planes_normalize_as<T, kAdd, kRelu, Store::kCached>(x, z, y, sizes, channel, k);
  }
}

template <typename T>
void planes_normalize(const T* x, const T* z, T* y, Planes sizes, int64_t channel,
                      NormalizeCoefficients<typename Pack<T>::Acc> k, bool relu, bool stream) {
  const auto run =
      z != nullptr
          ? (relu ? planes_normalize_to<T, true, true> : planes_normalize_to<T, true, false>)
          : (relu ? planes_normalize_to<T, false, true> : planes_normalize_to<T, false, false>);
  run(x, z, y, sizes, channel, k, stream);
}

/// dy after the mask of the ReLU. `centered` is x - high; `output` is only used for kOutput.
template <typename T, ReluMask kMask>
inline Pack<T> masked(const Pack<T>& dy, const Pack<T>& centered, const Pack<T>& output,
                      const Pack<T>& scale, const Pack<T>& shift) {
  if constexpr (kMask == ReluMask::kRecompute) {
    return relu_gradient(dy, fma(centered, scale, shift));
  } else if constexpr (kMask == ReluMask::kOutput) {
    return relu_gradient(dy, output);
  } else {
    return dy;
  }
}

template <typename T, ReluMask kMask>
ReduceResult planes_reduce_as(const T* dy, const T* x, const T* y, Planes sizes, int64_t channel,
                              NormalizeCoefficients<typename Pack<T>::Acc> k) {
  using P = Pack<T>;
  constexpr int64_t kWidth = P::kWidth;
  const P high = P::fill(k.high);
  const P scale = P::fill(k.scale);
  const P shift = P::fill(k.shift);
  const int64_t usual = std::min(kChunkElements, sizes.plane);
  const P usual_last = P::last_elements(usual % kWidth);
  const int64_t ahead = stride_ahead<T>(sizes);
  ReduceResult total{0, 0};
  P sum0 = P::fill(0), sum1 = P::fill(0), dot0 = P::fill(0), dot1 = P::fill(0);
  int64_t pending = 0;
  const auto flush = [&] {
    total.sum_dy += (sum0 + sum1).sum();
    total.sum_dy_xmu += (dot0 + dot1).sum();
    sum0 = sum1 = dot0 = dot1 = P::fill(0);
    pending = 0;
  };
  const auto add = [&](P& sum, P& dot, const P& gradient, const P& value, const P& output) {
    const P centered = value - high;
    const P g = masked<T, kMask>(gradient, centered, output, scale, shift);
    sum = sum + g;
    dot = fma(g, centered, dot);
  };
  for (int64_t n = 0; n < sizes.batch; ++n) {
    const int64_t start = (n * sizes.channels + channel) * sizes.plane;
    for (int64_t s = 0; s < sizes.plane; s += kChunkElements) {
      const int64_t length = std::min(kChunkElements, sizes.plane - s);
      const T* g = dy + start + s;
      const T* v = x + start + s;
      const T* o = kMask == ReluMask::kOutput ? y + start + s : v;
      const P last = length == usual ? usual_last : P::last_elements(length % kWidth);
      const auto ask = [&](int64_t i) {
        if (ahead > 0) {
          for (const T* p : {g, v}) {
            prefetch(p, ahead + i);
            prefetch(p, ahead + i + kWidth);
          }
        }
      };
      int64_t i = 0;
      for (; i + 2 * kWidth <= length; i += 2 * kWidth) {
        ask(i);
        add(sum0, dot0, P::load(g + i), P::load(v + i), P::load(o + i));
        add(sum1, dot1, P::load(g + i + kWidth), P::load(v + i + kWidth), P::load(o + i + kWidth));
      }
      ask(i);
      for (; i + kWidth <= length; i += kWidth) {
        add(sum0, dot0, P::load(g + i), P::load(v + i), P::load(o + i));
      }
      if (i < length && length > kWidth) {
        i = length - kWidth;
        add(sum1, dot1, P::load(g + i) * last, P::load(v + i), P::load(o + i));
      } else if (i < length) {  // past the end dy is 0 and x is `high`: adds nothing
        add(sum1, dot1, P::load(g, length),
            select(P::first_elements(length), P::load(v, length), high), P::load(o, length));
      }
      pending += length;
      if (pending >= kChunkElements) {
        flush();
      }
    }
  }
  flush();
  return total;
}

template <typename T>
ReduceResult planes_reduce(const T* dy, const T* x, const T* y, Planes sizes, int64_t channel,
                           NormalizeCoefficients<typename Pack<T>::Acc> k, ReluMask mask) {
  const auto run = mask == ReluMask::kRecompute ? planes_reduce_as<T, ReluMask::kRecompute>
                   : mask == ReluMask::kOutput  ? planes_reduce_as<T, ReluMask::kOutput>
                                                : planes_reduce_as<T, ReluMask::kNone>;
  return run(dy, x, y, sizes, channel, k);
}

template <typename T, ReluMask kMask, Store kStore>
void planes_gradient_as(const T* dy, const T* x, const T* y, T* dx, T* dz, Planes sizes,
                        int64_t channel, NormalizeCoefficients<typename Pack<T>::Acc> f,
                        GradientCoefficients<typename Pack<T>::Acc> b) {
  using P = Pack<T>;
  const P high = P::fill(f.high);
  const P scale = P::fill(f.scale);
  const P shift = P::fill(f.shift);
  const P dy_scale = P::fill(b.dy_scale);
  const P x_scale = P::fill(b.x_scale);
  const P constant = P::fill(b.shift);
  for (int64_t n = 0; n < sizes.batch; ++n) {
    const int64_t start = (n * sizes.channels + channel) * sizes.plane;
    const T* g = dy + start;
    const T* v = x + start;
    const T* o = kMask == ReluMask::kOutput ? y + start : v;
    const auto result = [&](const P& gradient, const P& value) {
      return fma(gradient, dy_scale, fma(value - high, x_scale, constant));
    };
    const auto through = [&](const P& gradient, const P& value, const P& output) {
      return masked<T, kMask>(gradient, value - high, output, scale, shift);
    };
    for_each_pack_of_plane<P::kWidth>(
        sizes.plane,
        [&](int64_t i) {
          const P value = P::load(v + i);
          const P gradient = through(P::load(g + i), value, P::load(o + i));
          result(gradient, value).template store<kStore>(dx + start + i);
          if (kMask != ReluMask::kNone && dz != nullptr) {
            gradient.template store<kStore>(dz + start + i);
          }
        },
        [&](int64_t n) {
          const P value = P::load(v, n);
          const P gradient = through(P::load(g, n), value, P::load(o, n));
          result(gradient, value).store(dx + start, n);
          if (kMask != ReluMask::kNone && dz != nullptr) {
            gradient.store(dz + start, n);
          }
        });
  }
}

template <typename T, ReluMask kMask>
void planes_gradient_to(const T* dy, const T* x, const T* y, T* dx, T* dz, Planes sizes,
                        int64_t channel, NormalizeCoefficients<typename Pack<T>::Acc> f,
                        GradientCoefficients<typename Pack<T>::Acc> b, bool stream) {
  if (stream && sizes.plane % Pack<T>::kWidth == 0 && can_stream(dx, sizes.plane) &&
      can_stream(dz, sizes.plane)) {
    planes_gradient_as<T, kMask, Store::kStream>(dy, x, y, dx, dz, sizes, channel, f, b);
    end_stream();
  } else {
    planes_gradient_as<T, kMask, Store::kCached>(dy, x, y, dx, dz, sizes, channel, f, b);
  }
}

template <typename T>
void planes_gradient(const T* dy, const T* x, const T* y, T* dx, T* dz, Planes sizes,
                     int64_t channel, NormalizeCoefficients<typename Pack<T>::Acc> f,
                     GradientCoefficients<typename Pack<T>::Acc> b, ReluMask mask, bool stream) {
  const auto run = mask == ReluMask::kRecompute ? planes_gradient_to<T, ReluMask::kRecompute>
                   : mask == ReluMask::kOutput  ? planes_gradient_to<T, ReluMask::kOutput>
                                                : planes_gradient_to<T, ReluMask::kNone>;
  run(dy, x, y, dx, dz, sizes, channel, f, b, stream);
}

}  // namespace APEX_CPU_VARIANT
}  // namespace apex::kernels
