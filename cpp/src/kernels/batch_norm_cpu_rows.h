#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "batch_norm_cpu_impl.h"

/// The channels-last half of CpuKernels: [R, C], a range of rows.

// Note [Back to front]
// The second pass over the rows starts where the first one ended, whose data the caches still have.
// It goes back in blocks, and forward within a block: processors fetch ahead in that direction, and
// steps back of half a kilobyte made the pass up to seven times slower (Zen 5).

namespace apex::kernels {
inline namespace APEX_CPU_VARIANT {

// Note [Bands]
// Rows are taken in bands of a few: side by side, so that what belongs to a channel (coefficients,
// sums) is loaded once per band, and each row in the order of memory, as caches like it. A column of
// many rows would be fewer loads still, but with a power of two of channels all its rows fall into
// the same few sets of the cache.
constexpr int64_t kBand = 4;
constexpr int64_t kBlockBytes = 65536;  // see Note [Back to front]

/// A number of rows that the compiler knows.
template <int64_t kRows>
using Rows = std::integral_constant<int64_t, kRows>;

/// band(first row, Rows<>()) for all rows of [begin, end): see Note [Back to front].
template <typename Band>
inline void for_each_band_backwards(int64_t begin, int64_t end, int64_t row_bytes,
                                    const Band& band) {
  const int64_t block = std::max(kBand, kBlockBytes / std::max<int64_t>(1, row_bytes));
  for (int64_t stop = end; stop > begin; stop -= std::min(block, stop - begin)) {
    int64_t row = std::max(begin, stop - block);
    for (; row + kBand <= stop; row += kBand) {
      band(row, Rows<kBand>());
    }
    for (; row < stop; ++row) {
      band(row, Rows<1>());
    }
  }
}

// Processors follow one stream by themselves, several side by side less well: the passes that only
// read ask for what comes next, this far ahead. It took a third to a half off them (Zen 5, data in
// the third-level cache); the passes that write gained nothing.
constexpr int64_t kAheadBytes = 8192;

/// Asks for the pack at `p` plus kAheadBytes; past the end of the data that is harmless.
template <typename T>
inline void prefetch_ahead(const T* p) {
#if defined(__GNUC__)
  constexpr int64_t kLine = 64;
  constexpr int64_t kBytes = Pack<T>::kWidth * static_cast<int64_t>(sizeof(T));
  const auto start = reinterpret_cast<uintptr_t>(p) + kAheadBytes;
  for (int64_t offset = 0; offset < kBytes; offset += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(start + offset));
  }
#endif
}

/// Calls pack(c, load) for the channels from c on, kWidth at a time: load(p) loads as many.
template <typename T, typename Each>
inline void for_each_channel_pack(int64_t channels, const Each& each) {
  using P = Pack<T>;
  for_each_pack<P::kWidth>(
      channels, [&](int64_t c) { each(c, [](const T* p) { return P::load(p); }); },
      [&](int64_t c, int64_t n) { each(c, [n](const T* p) { return P::load(p, n); }); });
}

/// Sums per channel in the type of computation, in whole packs.
template <typename T>
class ChannelSums {
 public:
  using Acc = typename Pack<T>::Acc;

  ChannelSums(int64_t channels, int columns)
      : padded_((channels + Pack<T>::kWidth - 1) / Pack<T>::kWidth * Pack<T>::kWidth),
        storage_(static_cast<size_t>(padded_ * columns)) {}
  Acc* column(int index) { return storage_.data() + index * padded_; }
  void clear(int index) { std::fill(column(index), column(index) + padded_, Acc(0)); }

 private:
  int64_t padded_;
  std::vector<Acc> storage_;
};

/// Adds kRows rows to `sum`: the values themselves (center is null), or deviations from `center`,
/// whose squares then go to `squares`.
template <typename T, int64_t kRows, bool kDeviations>
inline void add_band(const T* x, int64_t channels, const typename Pack<T>::Acc* center,
                     typename Pack<T>::Acc* sum, typename Pack<T>::Acc* squares) {
  using P = Pack<T>;
  for_each_channel_pack<T>(channels, [&](int64_t c, const auto& load) {
    P total = P::load_acc(sum + c);
    if constexpr (kDeviations) {
      const P middle = P::load_acc(center + c);
      P square = P::load_acc(squares + c);
      for (int64_t r = 0; r < kRows; ++r) {
        // Beyond the last channel there are zeros, in x as in the center.
        prefetch_ahead(x + r * channels + c);
        const P d = load(x + r * channels + c) - middle;
        total = total + d;
        square = fma(d, d, square);
      }
      square.store_acc(squares + c);
    } else {
      for (int64_t r = 0; r < kRows; ++r) {
        total = total + load(x + r * channels + c);
      }
    }
    total.store_acc(sum + c);
  });
}

template <typename T, bool kDeviations>
inline void add_rows(const T* x, int64_t rows, int64_t channels,
                     const typename Pack<T>::Acc* center, typename Pack<T>::Acc* sum,
                     typename Pack<T>::Acc* squares) {
  int64_t r = 0;
  for (; r + kBand <= rows; r += kBand) {
    add_band<T, kBand, kDeviations>(x + r * channels, channels, center, sum, squares);
  }
  for (; r < rows; ++r) {
    add_band<T, 1, kDeviations>(x + r * channels, channels, center, sum, squares);
  }
}

template <typename T>
void rows_statistics(const T* x, int64_t begin, int64_t end, int64_t channels, double* mean,
                     double* m2, int64_t count) {
  using Acc = typename Pack<T>::Acc;
  ChannelSums<T> scratch(channels, 3);
  Acc* center = scratch.column(0);
  Acc* sum = scratch.column(1);
  Acc* squares = scratch.column(2);
  for (int64_t row = begin; row < end;) {
    const int64_t rows = std::min(next_chunk(count, kFirstRows, kChunkRows), end - row);
    const T* chunk = x + row * channels;
    const double inverse = 1.0 / static_cast<double>(rows);
    const double before = static_cast<double>(count);
    const double share = static_cast<double>(rows) / (before + static_cast<double>(rows));
    if (count == 0) {  // see Note [Chunks]
      scratch.clear(1);
      add_rows<T, false>(chunk, rows, channels, nullptr, sum, nullptr);
      for (int64_t c = 0; c < channels; ++c) {
        center[c] = static_cast<Acc>(static_cast<double>(sum[c]) * inverse);
      }
    } else {
      for (int64_t c = 0; c < channels; ++c) {
        center[c] = static_cast<Acc>(mean[c]);
      }
    }
    scratch.clear(1);
    scratch.clear(2);
    add_rows<T, true>(chunk, rows, channels, center, sum, squares);
    for (int64_t c = 0; c < channels; ++c) {  // Chan's merge; its divisions are common to all
      const double total = static_cast<double>(sum[c]);
      const double offset = total * inverse;
      const double chunk_m2 = static_cast<double>(squares[c]) - total * offset;
      const double delta = static_cast<double>(center[c]) + offset - mean[c];
      mean[c] += delta * share;
      m2[c] += (chunk_m2 < 0 ? 0 : chunk_m2) + delta * delta * before * share;
    }
    count += rows;
    row += rows;
  }
}

template <typename T, bool kAdd, bool kRelu>
void rows_normalize_as(const T* x, const T* z, T* y, int64_t begin, int64_t end, int64_t channels,
                       const typename Pack<T>::Acc* high, const typename Pack<T>::Acc* scale,
                       const typename Pack<T>::Acc* shift) {
  using P = Pack<T>;
  const auto finish = [](P value, const P& added) {
    if constexpr (kAdd) {
      value = value + added;
    }
    if constexpr (kRelu) {
      value = relu(value);
    }
    return value;
  };
  const auto band = [&](int64_t row, auto rows) {
    const int64_t start = row * channels;
    const T* from = x + start;
    const T* plus = kAdd ? z + start : from;
    T* to = y + start;
    for_each_pack<P::kWidth>(
        channels,
        [&](int64_t c) {
          const P h = P::load_acc(high + c), k = P::load_acc(scale + c), s = P::load_acc(shift + c);
          for (int64_t i = c, r = 0; r < rows(); ++r, i += channels) {
            finish(fma(P::load(from + i) - h, k, s), P::load(plus + i)).store(to + i);
          }
        },
        [&](int64_t c, int64_t n) {
          const P h = P::load_acc(high + c, n), k = P::load_acc(scale + c, n),
                  s = P::load_acc(shift + c, n);
          for (int64_t i = c, r = 0; r < rows(); ++r, i += channels) {
            finish(fma(P::load(from + i, n) - h, k, s), P::load(plus + i, n)).store(to + i, n);
          }
        });
  };
  for_each_band_backwards(begin, end, channels * static_cast<int64_t>(sizeof(T)), band);
}

template <typename T>
void rows_normalize(const T* x, const T* z, T* y, int64_t begin, int64_t end, int64_t channels,
                    const typename Pack<T>::Acc* high, const typename Pack<T>::Acc* scale,
                    const typename Pack<T>::Acc* shift, bool relu) {
  if (z != nullptr) {
    (relu ? rows_normalize_as<T, true, true> : rows_normalize_as<T, true, false>)(
        x, z, y, begin, end, channels, high, scale, shift);
  } else {
    (relu ? rows_normalize_as<T, false, true> : rows_normalize_as<T, false, false>)(
        x, z, y, begin, end, channels, high, scale, shift);
  }
}

template <typename T, ReluMask kMask>
void rows_reduce_as(const T* dy, const T* x, const T* y, int64_t begin, int64_t end,
                    int64_t channels, const typename Pack<T>::Acc* high,
                    const typename Pack<T>::Acc* scale, const typename Pack<T>::Acc* shift,
                    double* sum_dy, double* sum_dy_xmu) {
  using P = Pack<T>;
  using Acc = typename P::Acc;
  ChannelSums<T> scratch(channels, 2);
  Acc* sums = scratch.column(0);
  Acc* dots = scratch.column(1);
  const auto coefficient = [&](const Acc* p, int64_t c) {
    const int64_t left = channels - c;
    return left >= P::kWidth ? P::load_acc(p + c) : P::load_acc(p + c, left);
  };
  const auto band = [&](int64_t row, auto rows) {
    const int64_t start = row * channels;
    for_each_channel_pack<T>(channels, [&](int64_t c, const auto& load) {
      const P h = coefficient(high, c), k = coefficient(scale, c), s = coefficient(shift, c);
      P sum = P::load_acc(sums + c), dot = P::load_acc(dots + c);
      for (int64_t at = start + c, r = 0; r < rows(); ++r, at += channels) {
        prefetch_ahead(x + at);
        prefetch_ahead(dy + at);
        const P centered = load(x + at) - h;
        const P g = masked<T, kMask>(load(dy + at), centered,
                                     load((kMask == ReluMask::kOutput ? y : x) + at), k, s);
        sum = sum + g;
        dot = fma(g, centered, dot);
      }
      sum.store_acc(sums + c);
      dot.store_acc(dots + c);
    });
  };
  for (int64_t chunk = begin; chunk < end; chunk += kChunkRows) {
    const int64_t stop = std::min(chunk + kChunkRows, end);
    int64_t row = chunk;
    for (; row + kBand <= stop; row += kBand) {
      band(row, Rows<kBand>());
    }
    for (; row < stop; ++row) {
      band(row, Rows<1>());
    }
    for (int64_t c = 0; c < channels; ++c) {
      sum_dy[c] += static_cast<double>(sums[c]);
      sum_dy_xmu[c] += static_cast<double>(dots[c]);
    }
    scratch.clear(0);
    scratch.clear(1);
  }
}

template <typename T>
void rows_reduce(const T* dy, const T* x, const T* y, int64_t begin, int64_t end, int64_t channels,
                 const typename Pack<T>::Acc* high, const typename Pack<T>::Acc* scale,
                 const typename Pack<T>::Acc* shift, ReluMask mask, double* sum_dy,
                 double* sum_dy_xmu) {
  const auto run = mask == ReluMask::kRecompute ? rows_reduce_as<T, ReluMask::kRecompute>
                   : mask == ReluMask::kOutput  ? rows_reduce_as<T, ReluMask::kOutput>
                                                : rows_reduce_as<T, ReluMask::kNone>;
  run(dy, x, y, begin, end, channels, high, scale, shift, sum_dy, sum_dy_xmu);
}

template <typename T, ReluMask kMask>
void rows_gradient_as(const T* dy, const T* x, const T* y, T* dx, T* dz, int64_t begin,
                      int64_t end, int64_t channels,
                      const typename Pack<T>::Acc* const forward[3],
                      const typename Pack<T>::Acc* const backward[3]) {
  using P = Pack<T>;
  const auto* high = forward[0];
  const auto* scale = forward[1];
  const auto* shift = forward[2];
  const auto* dy_scale = backward[0];
  const auto* x_scale = backward[1];
  const auto* constant = backward[2];
  const T* outputs = kMask == ReluMask::kOutput ? y : x;
  const auto band = [&](int64_t row, auto rows) {
    const int64_t start = row * channels;
    for_each_pack<P::kWidth>(
        channels,
        [&](int64_t c) {
          const P h = P::load_acc(high + c), k = P::load_acc(scale + c), s = P::load_acc(shift + c);
          const P a = P::load_acc(dy_scale + c), b = P::load_acc(x_scale + c),
                  d = P::load_acc(constant + c);
          for (int64_t i = start + c, r = 0; r < rows(); ++r, i += channels) {
            const P centered = P::load(x + i) - h;
            const P g = masked<T, kMask>(P::load(dy + i), centered, P::load(outputs + i), k, s);
            fma(g, a, fma(centered, b, d)).store(dx + i);
            if (dz != nullptr) {
              g.store(dz + i);
            }
          }
        },
        [&](int64_t c, int64_t n) {
          const P h = P::load_acc(high + c, n), k = P::load_acc(scale + c, n),
                  s = P::load_acc(shift + c, n);
          const P a = P::load_acc(dy_scale + c, n), b = P::load_acc(x_scale + c, n),
                  d = P::load_acc(constant + c, n);
          for (int64_t i = start + c, r = 0; r < rows(); ++r, i += channels) {
            const P centered = P::load(x + i, n) - h;
            const P g =
                masked<T, kMask>(P::load(dy + i, n), centered, P::load(outputs + i, n), k, s);
            fma(g, a, fma(centered, b, d)).store(dx + i, n);
            if (dz != nullptr) {
              g.store(dz + i, n);
            }
          }
        });
  };
  for_each_band_backwards(begin, end, channels * static_cast<int64_t>(sizeof(T)), band);
}

template <typename T>
void rows_gradient(const T* dy, const T* x, const T* y, T* dx, T* dz, int64_t begin, int64_t end,
                   int64_t channels, const typename Pack<T>::Acc* const forward[3],
                   const typename Pack<T>::Acc* const backward[3], ReluMask mask) {
  const auto run = mask == ReluMask::kRecompute ? rows_gradient_as<T, ReluMask::kRecompute>
                   : mask == ReluMask::kOutput  ? rows_gradient_as<T, ReluMask::kOutput>
                                                : rows_gradient_as<T, ReluMask::kNone>;
  run(dy, x, y, dx, dz, begin, end, channels, forward, backward);
}

template <typename T>
const CpuKernels<T>& kernels_of_this_variant() {
  static const CpuKernels<T> kernels{
      planes_statistics<T>, planes_normalize<T>, planes_reduce<T>, planes_gradient<T>,
      rows_statistics<T>,   rows_normalize<T>,   rows_reduce<T>,   rows_gradient<T>};
  return kernels;
}

}  // namespace APEX_CPU_VARIANT
}  // namespace apex::kernels
