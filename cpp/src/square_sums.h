// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Sums of squares beside another pass over the values. Pure.

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
// They cost nothing beside a copy if the compiler makes vectors of them. So they are added in
// lanes, one beside the other, whose order nobody has to change for that, and of values with 32
// bits or less in float32: for a block, whose sum is added in double, so that little is lost
// however many values there are. A block with squares that overflow or vanish in float32 is added
// once more in double. Ranks get the same bits from the same values, whether they are scaled on the
// way or not: what is decided by a norm is decided alike on all ranks.

constexpr int64_t kSquaresBlock = 512;
constexpr double kLeastBlock = 1e-26, kMostBlock = 1e37;

/// Of an all-reduce's tensor, where somebody asks for it.
/// A rank reads the part of the message that it sums only once, then. All but `sent` is set when
/// the all-reduce has completed, to the same bits on every rank.
struct SquareSums {
  double sent = 0;           ///< what this rank gave, but for that part; set when it is issued
  std::vector<double> kept;  ///< by rank: of that part, what the rank itself gave
  double reduced = 0;        ///< the result
};

enum class SquareCopy { kNone, kPlain, kScaled };

/// In the order of a tree: what waits for the sum before is short.
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

/// Whether a block's sum in float32 can be trusted.
inline bool in_range(double block) { return block > kLeastBlock && block < kMostBlock; }

/// Of numbers that are added in their own type, what is measured is written to `out` on the way:
/// the copy hides what reading takes. In vectors that stay in registers, though `out` may be `in`.
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
/// The same bits: the same lanes, and no multiply-add.
template <SquareCopy copy, typename T>
__attribute__((target("avx2"))) double add_packs_in_avx2(T* out, const T* in, T factor,
                                                         int64_t count) {
  return add_packs<copy>(out, in, factor, count);
}
#endif

/// Of numbers that are added in another type.
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

/// Copies `in` to `out` as said, which may be the same memory, and returns the sum of squares of
/// what lies there then. See Note [Sums of squares].
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

/// The same bits, of a NaN as well.
template <typename T>
double copy_squares(T* out, const T* in, int64_t count) {
  return add_squares<SquareCopy::kPlain>(out, in, T(1), count);
}

template <typename T>
double copy_scaled_squares(T* out, const T* in, T factor, int64_t count) {
  return add_squares<SquareCopy::kScaled>(out, in, factor, count);
}

}  // namespace apex::parallel
