// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Sums of squares beside another pass over the values. Pure.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

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

constexpr int64_t kSquareLanes = 16, kSquaresBlock = 512;
constexpr double kLeastBlock = 1e-26, kMostBlock = 1e37;

/// Of an all-reduce's tensor, where somebody asks for it.
struct SquareSums {
  double own = 0;      ///< what this rank gave; set when it is issued
  double reduced = 0;  ///< the result; set when it has completed, to the same bits on every rank
};

template <typename Lane, typename T>
double add_block_of_squares(const T* values, int64_t count) {
  std::array<Lane, kSquareLanes> lanes{};
  const int64_t whole = count - count % kSquareLanes;
  for (int64_t i = 0; i < whole; i += kSquareLanes) {
    for (int64_t lane = 0; lane < kSquareLanes; ++lane) {
      const auto value = static_cast<Lane>(values[i + lane]);
      lanes[static_cast<size_t>(lane)] += value * value;
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    const auto value = static_cast<Lane>(values[i]);
    lanes[static_cast<size_t>(i - whole)] += value * value;
  }
  double sum = 0;
  for (const Lane one : lanes) sum += static_cast<double>(one);
  return sum;
}

/// `write(begin, end)` makes `values` of that block what they are: so they are in the cache.
template <typename T, typename Write>
double add_squares(const T* values, int64_t count, Write&& write) {
  double sum = 0;
  for (int64_t begin = 0; begin < count; begin += kSquaresBlock) {
    const int64_t size = std::min(count - begin, kSquaresBlock);
    write(begin, begin + size);
    double block = add_block_of_squares<at::opmath_type<T>>(values + begin, size);
    if (!(block > kLeastBlock && block < kMostBlock))
      block = add_block_of_squares<double>(values + begin, size);
    sum += block;
  }
  return sum;
}

}  // namespace apex::parallel
