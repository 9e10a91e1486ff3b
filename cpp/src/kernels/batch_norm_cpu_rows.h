// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batch_norm_cpu_impl.h"

/// The channels-last kernels of CpuKernels. Each works on a range of rows of [R, C].

// Note [Back to front]
// The second pass over the rows starts where the first pass ended, because that data is still in
// the caches. It goes through blocks backwards, and through the rows of a block forwards, in the
// direction of the hardware prefetcher. Backward steps of half a kilobyte made the pass up to seven
// times slower (Zen 5).

namespace apex::kernels {
inline namespace APEX_CPU_VARIANT {

// Note [Bands]
// Reading one row after the other is fastest, as long as the data per channel (sums, coefficients)
// also fits into the first-level cache. Passes that only read process wider rows in bands of a few
// rows, so that the sums of a channel are loaded and stored once per band. They also process the
// narrowest rows in bands, because each row would wait for the few sums of the row before. Such a
// band is almost contiguous. Most rows of 16-bit values are processed in bands as well, because
// they have twice the sums for the same bytes. Columns of many rows would need even fewer loads.
// But if the number of channels is a power of two, all rows of a column map to the same few cache
// sets. Strips of some channels over all rows have the same problem: they were slower than two
// passes over everything, even where the strip stayed in the second-level cache. The passes that
// write never use bands. With rows a power of two apart they were up to 2.7 times slower, because
// the processor mistakes a load from one row for a load of data that was just stored to another.
// Non-temporal stores also need consecutive cache lines. (Zen 3: for rows with 0.5 to 2 KiB of
// sums, one row at a time took 0.7 of the time of bands of four; with 64 bytes of sums, twice the
// time.)
constexpr int64_t kWideBytes = 2048;
constexpr int64_t kNarrowBytes = 256;
constexpr int64_t kBlockBytes = 65536;  // see Note [Back to front]

/// A number of adjacent rows, known at compile time.
template <int64_t kCount, bool kIsWide>
struct Band {
  static constexpr int64_t kRows = kCount;
  static constexpr bool kWide = kIsWide;
};

template <int64_t kRows, bool kWide, typename Each>
inline int64_t for_each_band_of(int64_t begin, int64_t end, const Each& each) {
  for (; begin + kRows <= end; begin += kRows) {
    each(begin, Band<kRows, kWide>());
  }
  return begin;
}

// Rows of 16-bit values have half the bytes for the same sums. Their bands read pieces that are too
// short for the hardware prefetcher, so all but the narrowest use software prefetches. The sums of
// backward read two arrays. For 256 to 512 channels they process one row at a time (Zen 4: 0.4 to
// 0.9 of the time of bands).
template <typename T>
inline constexpr bool kHalfWidth = sizeof(T) < sizeof(typename Pack<T>::Acc);
constexpr int64_t kBandBytes = 512;  // largest rows of 16-bit values with bands in backward

/// Calls each(first row, Band<>()) for all rows of [begin, end); see Note [Bands]. kArrays is the
/// number of arrays read: x, or x and dy.
template <typename T, int kArrays, typename Each>
inline void for_each_band(int64_t begin, int64_t end, int64_t channels, const Each& each) {
  constexpr int64_t kBand = 4;
  const int64_t bytes = channels * static_cast<int64_t>(sizeof(typename Pack<T>::Acc));
  const bool single = bytes <= kWideBytes && bytes > kNarrowBytes &&
                      (!kHalfWidth<T> || (kArrays == 2 && bytes > kBandBytes));
  if (bytes <= kNarrowBytes) {
    begin = for_each_band_of<kBand, false>(begin, end, each);
  } else if (!single) {
    begin = for_each_band_of<kBand, true>(begin, end, each);
  }
  for_each_band_of<1, false>(begin, end, each);
}

/// Calls each(row) for all rows of [begin, end); see Note [Back to front].
template <typename Each>
inline void for_each_row_backwards(int64_t begin, int64_t end, int64_t row_bytes,
                                   const Each& each) {
  const int64_t block = std::max<int64_t>(1, kBlockBytes / std::max<int64_t>(1, row_bytes));
  for (int64_t stop = end; stop > begin; stop -= std::min(block, stop - begin)) {
    for (int64_t row = std::max(begin, stop - block); row < stop; ++row) {
      each(row);
    }
  }
}

// Prefetch distances in bytes. Hardware prefetchers handle one or two streams well, but not several
// at once. So bands of wide rows use software prefetches, which saved a third to a half of the time
// (Zen 5, data in the third-level cache; on Zen 3 they cost 15 %). Other passes gain a little with
// one stream and lose with two (Zen 3).
constexpr int64_t kAheadOfBands = 8192;
constexpr int64_t kAheadOfRows = 2048;

template <int64_t kBytes, typename T>
inline void prefetch_ahead(const T* p) {
  prefetch(p, kBytes / static_cast<int64_t>(sizeof(T)));
}

/// Calls each(c, load) for packs of kWidth channels from c on. load(p) loads one pack, or the rest
/// after the last whole pack.
template <typename T, typename Each>
inline void for_each_channel_pack(int64_t channels, const Each& each) {
  using P = Pack<T>;
  for_each_pack<P::kWidth>(
      channels, [&](int64_t c) { each(c, [](const T* p) { return P::load(p); }); },
      [&](int64_t c, int64_t n) { each(c, [n](const T* p) { return P::load(p, n); }); });
}

/// Sums or coefficients per channel in the compute type. The columns are padded with zeros to whole
/// packs.
template <typename T>
class ChannelColumns {
 public:
  using Acc = typename Pack<T>::Acc;

  ChannelColumns(int64_t channels, int columns)
      : padded_((channels + Pack<T>::kWidth - 1) / Pack<T>::kWidth * Pack<T>::kWidth),
        storage_(static_cast<size_t>(padded_ * columns)) {}
  Acc* column(int index) { return storage_.data() + index * padded_; }
  void clear(int index) { std::fill(column(index), column(index) + padded_, Acc(0)); }

  /// Permutes a column from channel order to lane order; to_channels() reverses it. See Note
  /// [Lanes].
  void to_lanes(int index) {
    for (Acc* p = column(index); p < column(index) + padded_; p += Pack<T>::kWidth) {
      Pack<T>::to_lanes(p);
    }
  }
  void to_channels(int index) {
    for (Acc* p = column(index); p < column(index) + padded_; p += Pack<T>::kWidth) {
      Pack<T>::to_elements(p);
    }
  }
  /// Stores a column of coefficients in lane order and returns it.
  const Acc* set_coefficients(int index, const Acc* values, int64_t channels) {
    std::transform(values, values + channels, column(index), canonical<Acc>);
    to_lanes(index);
    return column(index);
  }

 private:
  int64_t padded_;
  std::vector<Acc> storage_;
};

/// Adds a band of rows to `sum`. With kDeviations it adds the deviations from `center`, and their
/// squares to `squares`. Otherwise it adds the values, and `center` is null.
template <typename T, typename Rows, bool kDeviations>
inline void add_band(const T* x, int64_t channels, const typename Pack<T>::Acc* center,
                     typename Pack<T>::Acc* sum, typename Pack<T>::Acc* squares) {
  constexpr int64_t kAhead = Rows::kWide ? kAheadOfBands : kAheadOfRows;
  using P = Pack<T>;
  for_each_channel_pack<T>(channels, [&](int64_t c, const auto& load) {
    P total = P::load_lanes(sum + c);
    if constexpr (kDeviations) {
      const P middle = P::load_lanes(center + c);
      P square = P::load_lanes(squares + c);
      for (int64_t r = 0; r < Rows::kRows; ++r) {
        // Past the last channel both x and center are zero.
        prefetch_ahead<kAhead>(x + r * channels + c);
        const P d = load(x + r * channels + c) - middle;
        total = total + d;
        square = fma(d, d, square);
      }
      square.store_lanes(squares + c);
    } else {
      for (int64_t r = 0; r < Rows::kRows; ++r) {
        total = total + load(x + r * channels + c);
      }
    }
    total.store_lanes(sum + c);
  });
}

template <typename T, bool kDeviations>
inline void add_rows(const T* x, int64_t rows, int64_t channels,
                     const typename Pack<T>::Acc* center, typename Pack<T>::Acc* sum,
                     typename Pack<T>::Acc* squares) {
  for_each_band<T, 1>(0, rows, channels, [&](int64_t row, auto band) {
    add_band<T, decltype(band), kDeviations>(x + row * channels, channels, center, sum, squares);
  });
}

template <typename T>
void rows_statistics(const T* x, int64_t begin, int64_t end, int64_t channels, double* mean,
                     double* m2, int64_t count) {
  using Acc = typename Pack<T>::Acc;
  ChannelColumns<T> scratch(channels, 3);
  Acc* center = scratch.column(0);
  Acc* sum = scratch.column(1);
  Acc* squares = scratch.column(2);
  for (int64_t row = begin; row < end;) {
    const int64_t most = count == 0 ? kFirstRows : std::min(count, kChunkRows);
    const int64_t rows = std::min(most, end - row);
    const T* chunk = x + row * channels;
    const double inverse = 1.0 / static_cast<double>(rows);
    const double before = static_cast<double>(count);
    const double share = static_cast<double>(rows) / (before + static_cast<double>(rows));
    if (count == 0) {  // see Note [Chunks]
      scratch.clear(1);
      add_rows<T, false>(chunk, rows, channels, nullptr, sum, nullptr);
      scratch.to_channels(1);
      for (int64_t c = 0; c < channels; ++c) {
        center[c] = static_cast<Acc>(static_cast<double>(sum[c]) * inverse);
      }
    } else {
      for (int64_t c = 0; c < channels; ++c) {
        center[c] = static_cast<Acc>(mean[c]);
      }
    }
    scratch.to_lanes(0);
    scratch.clear(1);
    scratch.clear(2);
    add_rows<T, true>(chunk, rows, channels, center, sum, squares);
    for (int column = 0; column < 3; ++column) {
      scratch.to_channels(column);
    }
    for (int64_t c = 0; c < channels; ++c) {  // Chan's merge; all channels share its divisions
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

template <typename T, bool kAdd, bool kRelu, Store kStore>
void rows_normalize_as(const T* x, const T* z, T* y, int64_t begin, int64_t end, int64_t channels,
                       const typename Pack<T>::Acc* high, const typename Pack<T>::Acc* scale,
                       const typename Pack<T>::Acc* shift) {
  using P = Pack<T>;
  ChannelColumns<T> coefficients(channels, 3);
  high = coefficients.set_coefficients(0, high, channels);
  scale = coefficients.set_coefficients(1, scale, channels);
  shift = coefficients.set_coefficients(2, shift, channels);
  const auto apply = [&](int64_t c, const P& value, const P& added) {
    P result =
        fma(value - P::load_lanes(high + c), P::load_lanes(scale + c), P::load_lanes(shift + c));
    if constexpr (kAdd) {
      result = result + added;
    }
    if constexpr (kRelu) {
      result = relu(result);
    }
    return result;
  };
  const auto each = [&](int64_t row) {
    const T* from = x + row * channels;
    const T* plus = kAdd ? z + row * channels : from;
    T* to = y + row * channels;
    for_each_pack<P::kWidth>(
        channels,
        [&](int64_t c) {
          prefetch_ahead<kAheadOfRows>(from + c);
          apply(c, P::load(from + c), P::load(plus + c)).template store<kStore>(to + c);
        },
        [&](int64_t c, int64_t n) {
          apply(c, P::load(from + c, n), P::load(plus + c, n)).store(to + c, n);
        });
  };
  for_each_row_backwards(begin, end, channels * static_cast<int64_t>(sizeof(T)), each);
}

template <typename T, bool kAdd, bool kRelu>
void rows_normalize_to(const T* x, const T* z, T* y, int64_t begin, int64_t end, int64_t channels,
                       const typename Pack<T>::Acc* high, const typename Pack<T>::Acc* scale,
                       const typename Pack<T>::Acc* shift, bool stream) {
  if (stream && can_stream(y, channels)) {
    rows_normalize_as<T, kAdd, kRelu, Store::kStream>(x, z, y, begin, end, channels, high, scale,
                                                      shift);
    end_stream();
  } else {
    rows_normalize_as<T, kAdd, kRelu, Store::kCached>(x, z, y, begin, end, channels, high, scale,
                                                      shift);
  }
}

template <typename T>
void rows_normalize(const T* x, const T* z, T* y, int64_t begin, int64_t end, int64_t channels,
                    const typename Pack<T>::Acc* high, const typename Pack<T>::Acc* scale,
                    const typename Pack<T>::Acc* shift, bool relu, bool stream) {
  const auto run =
      z != nullptr
          ? (relu ? rows_normalize_to<T, true, true> : rows_normalize_to<T, true, false>)
          : (relu ? rows_normalize_to<T, false, true> : rows_normalize_to<T, false, false>);
  run(x, z, y, begin, end, channels, high, scale, shift, stream);
}

template <typename T, ReluMask kMask>
void rows_reduce_as(const T* dy, const T* x, const T* y, int64_t begin, int64_t end,
                    int64_t channels, const typename Pack<T>::Acc* high,
                    const typename Pack<T>::Acc* scale, const typename Pack<T>::Acc* shift,
                    double* sum_dy, double* sum_dy_xmu) {
  using P = Pack<T>;
  using Acc = typename P::Acc;
  ChannelColumns<T> scratch(channels, 5);
  Acc* sums = scratch.column(0);
  Acc* dots = scratch.column(1);
  high = scratch.set_coefficients(2, high, channels);
  scale = scratch.set_coefficients(3, scale, channels);
  shift = scratch.set_coefficients(4, shift, channels);
  const auto band = [&](int64_t row, auto rows) {
    using Rows = decltype(rows);
    const int64_t start = row * channels;
    for_each_channel_pack<T>(channels, [&](int64_t c, const auto& load) {
      const P h = P::load_lanes(high + c), k = P::load_lanes(scale + c),
              s = P::load_lanes(shift + c);
      P sum = P::load_lanes(sums + c), dot = P::load_lanes(dots + c);
      for (int64_t at = start + c, r = 0; r < Rows::kRows; ++r, at += channels) {
        if constexpr (Rows::kWide || (kHalfWidth<T> && Rows::kRows == 1)) {
          constexpr int64_t kAhead = Rows::kWide ? kAheadOfBands : kAheadOfRows;
          prefetch_ahead<kAhead>(x + at);
          prefetch_ahead<kAhead>(dy + at);
        }
        const P centered = load(x + at) - h;
        const P g = masked<T, kMask>(load(dy + at), centered,
                                     load((kMask == ReluMask::kOutput ? y : x) + at), k, s);
        sum = sum + g;
        dot = fma(g, centered, dot);
      }
      sum.store_lanes(sums + c);
      dot.store_lanes(dots + c);
    });
  };
  for (int64_t chunk = begin; chunk < end; chunk += kChunkRows) {
    const int64_t stop = std::min(chunk + kChunkRows, end);
    for_each_band<T, 2>(chunk, stop, channels, band);
    scratch.to_channels(0);
    scratch.to_channels(1);
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

template <typename T, ReluMask kMask, Store kStore>
void rows_gradient_as(const T* dy, const T* x, const T* y, T* dx, T* dz, int64_t begin, int64_t end,
                      int64_t channels, const typename Pack<T>::Acc* const forward[3],
                      const typename Pack<T>::Acc* const backward[3]) {
  using P = Pack<T>;
  using Acc = typename P::Acc;
  ChannelColumns<T> coefficients(channels, 6);
  const Acc* const high = coefficients.set_coefficients(0, forward[0], channels);
  const Acc* const scale = coefficients.set_coefficients(1, forward[1], channels);
  const Acc* const shift = coefficients.set_coefficients(2, forward[2], channels);
  const Acc* const dy_scale = coefficients.set_coefficients(3, backward[0], channels);
  const Acc* const x_scale = coefficients.set_coefficients(4, backward[1], channels);
  const Acc* const constant = coefficients.set_coefficients(5, backward[2], channels);
  const T* const outputs = kMask == ReluMask::kOutput ? y : x;
  const auto through = [&](int64_t c, const P& gradient, const P& centered, const P& output) {
    return masked<T, kMask>(gradient, centered, output, P::load_lanes(scale + c),
                            P::load_lanes(shift + c));
  };
  const auto result = [&](int64_t c, const P& gradient, const P& centered) {
    return fma(gradient, P::load_lanes(dy_scale + c),
               fma(centered, P::load_lanes(x_scale + c), P::load_lanes(constant + c)));
  };
  const auto each = [&](int64_t row) {
    const int64_t start = row * channels;
    for_each_pack<P::kWidth>(
        channels,
        [&](int64_t c) {
          const int64_t i = start + c;
          const P centered = P::load(x + i) - P::load_lanes(high + c);
          const P gradient = through(c, P::load(dy + i), centered, P::load(outputs + i));
          result(c, gradient, centered).template store<kStore>(dx + i);
          if (kMask != ReluMask::kNone && dz != nullptr) {
            gradient.template store<kStore>(dz + i);
          }
        },
        [&](int64_t c, int64_t n) {
          const int64_t i = start + c;
          const P centered = P::load(x + i, n) - P::load_lanes(high + c);
          const P gradient = through(c, P::load(dy + i, n), centered, P::load(outputs + i, n));
          result(c, gradient, centered).store(dx + i, n);
          if (kMask != ReluMask::kNone && dz != nullptr) {
            gradient.store(dz + i, n);
          }
        });
  };
  for_each_row_backwards(begin, end, channels * static_cast<int64_t>(sizeof(T)), each);
}

template <typename T, ReluMask kMask>
void rows_gradient_to(const T* dy, const T* x, const T* y, T* dx, T* dz, int64_t begin, int64_t end,
                      int64_t channels, const typename Pack<T>::Acc* const forward[3],
                      const typename Pack<T>::Acc* const backward[3], bool stream) {
  if (stream && can_stream(dx, channels) && can_stream(dz, channels)) {
    rows_gradient_as<T, kMask, Store::kStream>(dy, x, y, dx, dz, begin, end, channels, forward,
                                               backward);
    end_stream();
  } else {
    rows_gradient_as<T, kMask, Store::kCached>(dy, x, y, dx, dz, begin, end, channels, forward,
                                               backward);
  }
}

template <typename T>
void rows_gradient(const T* dy, const T* x, const T* y, T* dx, T* dz, int64_t begin, int64_t end,
                   int64_t channels, const typename Pack<T>::Acc* const forward[3],
                   const typename Pack<T>::Acc* const backward[3], ReluMask mask, bool stream) {
  const auto run = mask == ReluMask::kRecompute ? rows_gradient_to<T, ReluMask::kRecompute>
                   : mask == ReluMask::kOutput  ? rows_gradient_to<T, ReluMask::kOutput>
                                                : rows_gradient_to<T, ReluMask::kNone>;
  run(dy, x, y, dx, dz, begin, end, channels, forward, backward, stream);
}

template <typename T>
const CpuKernels<T>& kernels_of_this_variant() {
  static const CpuKernels<T> kernels{planes_statistics<T>, planes_normalize<T>, planes_reduce<T>,
                                     planes_gradient<T>,   rows_statistics<T>,  rows_normalize<T>,
                                     rows_reduce<T>,       rows_gradient<T>};
  return kernels;
}

}  // namespace APEX_CPU_VARIANT
}  // namespace apex::kernels
