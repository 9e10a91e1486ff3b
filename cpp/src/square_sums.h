// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Sums of squares, computed while the values are copied or scaled. Pure.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <vector>

#include <ATen/OpMathType.h>

namespace apex::parallel {

// Note [Sums of squares]
//
// A sum of squares is free during a copy if the compiler vectorizes it. So the values are added in
// independent lanes, which the compiler can vectorize without reordering additions. Values of 32
// bits or fewer are added in float32 within a block, and the sums of blocks are added in double, so
// that precision does not degrade with the number of values. A block whose squares overflow or
// underflow in float32 is added again in double. Ranks get the same bits from the same values,
// whether the values are scaled during the pass or not. So all ranks take the same decision where
// it depends on a norm.

constexpr int64_t kSquaresBlock = 512;
constexpr double kLeastBlock = 1e-26, kMostBlock = 1e37;

/// Sums of squares of the tensor of an all-reduce, if the caller requests them. Each rank sums one
/// part of the message. It measures its own values in that part while it sums them, so that it
/// reads them only once. `kept` and `reduced` are set when the all-reduce has completed, to the
/// same bits on every rank.
struct SquareSums {
  double sent = 0;           ///< this rank's input without the part that it sums; set at issue
  std::vector<double> kept;  ///< by rank: the rank's own input to the part that it sums
  double reduced = 0;        ///< the result
};

enum class SquareCopy { kNone, kPlain, kScaled };

/// Adds the lanes and `rest` as a tree, which keeps the chain of dependent additions short.
template <typename Pack, typename T>
inline __attribute__((always_inline)) double sum_of_lanes(const Pack (&lanes)[4], T rest) {
  constexpr size_t kEach = sizeof(Pack) / sizeof(T);
  const Pack pack = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  double sums[kEach];
  for (size_t i = 0; i < kEach; ++i) sums[i] = static_cast<double>(pack[i]);
  for (size_t width = kEach / 2; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0] + static_cast<double>(rest);
}

/// Whether the sum of a block in float32 is reliable: no square has overflowed or underflowed.
inline bool in_range(double block) { return block > kLeastBlock && block < kMostBlock; }

/// The sum of squares of values that are added in their own type. `copy` chooses whether the values
/// are also written to `out`, plain or scaled; `out` may be `in`. The lanes stay in registers.
template <SquareCopy copy, typename T>
inline __attribute__((always_inline)) double add_packs(T* out, const T* in, T factor,
                                                       int64_t count) {
  using Pack [[gnu::vector_size(32)]] = T;
  constexpr int64_t kEach = sizeof(Pack) / sizeof(T), kPacks = 4;
  Pack lanes[kPacks] = {};
  int64_t at = 0;
  for (; at + kEach * kPacks <= count; at += kEach * kPacks) {
    for (int64_t i = 0; i < kPacks; ++i) {
      Pack values;
      std::memcpy(&values, in + at + i * kEach, sizeof(Pack));
      if constexpr (copy == SquareCopy::kScaled) values *= factor;
      if constexpr (copy != SquareCopy::kNone)
        std::memcpy(out + at + i * kEach, &values, sizeof(Pack));
      lanes[i] += values * values;
    }
  }
  T rest = 0;
  for (; at < count; ++at) {
    const T value = copy == SquareCopy::kScaled ? in[at] * factor : in[at];
    if constexpr (copy != SquareCopy::kNone) out[at] = value;
    rest += value * value;
  }
  return sum_of_lanes(lanes, rest);
}

#if defined(__x86_64__)
/// Returns the same bits as add_packs(): it has the same lanes and no fused multiply-add.
template <SquareCopy copy, typename T>
__attribute__((target("avx2"))) double add_packs_in_avx2(T* out, const T* in, T factor,
                                                         int64_t count) {
  return add_packs<copy>(out, in, factor, count);
}
#endif

/// The sum of squares of values that are added in type Lane, not in their own.
template <typename Lane, typename T>
double add_lanes(const T* values, int64_t count) {
  std::array<Lane, 16> lanes{};
  for (int64_t at = 0; at < count; at += 16) {
    for (int64_t i = 0; i < std::min<int64_t>(16, count - at); ++i) {
      const auto value = static_cast<Lane>(values[at + i]);
      lanes[static_cast<size_t>(i)] += value * value;
    }
  }
  double sum = 0;
  for (const Lane one : lanes) sum += static_cast<double>(one);
  return sum;
}

template <SquareCopy copy, typename T>
double add_block(T* out, const T* in, T factor, int64_t count) {
  if constexpr (std::is_same_v<T, at::opmath_type<T>>) {
#if defined(__x86_64__)
    static const bool wide = __builtin_cpu_supports("avx2");
    if (wide) return add_packs_in_avx2<copy>(out, in, factor, count);
#endif
    return add_packs<copy>(out, in, factor, count);
  } else {
    static_assert(copy != SquareCopy::kScaled);
    if constexpr (copy == SquareCopy::kPlain)
      std::memcpy(out, in, static_cast<size_t>(count) * sizeof(T));
    return add_lanes<at::opmath_type<T>>(in, count);
  }
}

/// Copies `in` to `out`, plain or scaled, and returns the sum of squares of the values written.
/// With kNone it writes nothing and returns the sum of squares of `in`. `out` may be `in`. See Note
/// [Sums of squares].
template <SquareCopy copy, typename T>
double add_squares(T* out, const T* in, T factor, int64_t count) {
  double sum = 0;
  for (int64_t begin = 0; begin < count; begin += kSquaresBlock) {
    const int64_t size = std::min(count - begin, kSquaresBlock);
    T* const to = copy == SquareCopy::kNone ? nullptr : out + begin;
    const T* const from = in + begin;
    double block = add_block<copy>(to, from, factor, size);
    if (!in_range(block)) {
      const T* const values = copy == SquareCopy::kNone ? from : to;
      block = add_lanes<double>(values, size);
    }
    sum += block;
  }
  return sum;
}

template <typename T>
double squares_of(const T* values, int64_t count) {
  return add_squares<SquareCopy::kNone, T>(nullptr, values, T(1), count);
}

/// A bitwise copy, also of NaNs.
template <typename T>
double copy_squares(T* out, const T* in, int64_t count) {
  return add_squares<SquareCopy::kPlain>(out, in, T(1), count);
}

template <typename T>
double copy_scaled_squares(T* out, const T* in, T factor, int64_t count) {
  return add_squares<SquareCopy::kScaled>(out, in, factor, count);
}

}  // namespace apex::parallel
