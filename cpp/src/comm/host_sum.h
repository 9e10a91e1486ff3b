// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Sums over ranks, where their messages lie.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace apex::parallel {

/// Whether combine() can do it: sum, product, largest and smallest of real numbers, averages of
/// floating-point and bitwise operations of integer ones. float16 and bfloat16 are combined in
/// float32 and rounded once.
bool can_combine(c10d::ReduceOp::RedOpType op, at::ScalarType dtype);

/// Of floating-point elements. The same bits for any number of threads.
struct CombinedSquares {
  size_t source = 0;  ///< which of `from` is measured as well
  double of_source = 0;
  double of_result = 0;
};

/// Combines `numel` elements that lie at `from` of each rank, in the order of `from`, and writes
/// the result to each of `to`. `to` may hold pointers of `from`, but nothing else may overlap. An
/// element has the same bits wherever it lies and however many there are. Uses torch's intra-op
/// threads where there is enough to do.
/// @param squares  if given, filled from what is in the cache then.
void combine(c10d::ReduceOp::RedOpType op, at::ScalarType dtype, int64_t numel,
             const std::vector<const char*>& from, const std::vector<char*>& to,
             CombinedSquares* squares = nullptr);

}  // namespace apex::parallel
