// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Reductions over ranks, directly on their messages.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace apex::parallel {

/// Whether combine() supports it: sum, product, minimum and maximum of real dtypes, averages of
/// floating-point dtypes, and bitwise operations of integer dtypes. float16 and bfloat16 are
/// combined in float32 and rounded once.
bool can_combine(c10d::ReduceOp::RedOpType op, at::ScalarType dtype);

/// Sums of squares of floating-point elements. The same bits for any number of threads.
struct CombinedSquares {
  size_t source = 0;  ///< index in `from` of the input that is also measured
  double of_source = 0;
  double of_result = 0;
};

/// Combines `numel` elements at the pointers `from` (one per rank), in this order, and writes the
/// result to each pointer of `to`. `to` may repeat pointers of `from`; nothing else may overlap. An
/// element's bits do not depend on its position or on `numel`. Uses torch's intra-op threads for
/// large inputs.
/// @param squares  if not null, filled while the data is in the cache.
void combine(c10d::ReduceOp::RedOpType op, at::ScalarType dtype, int64_t numel,
             const std::vector<const char*>& from, const std::vector<char*>& to,
             CombinedSquares* squares = nullptr);

}  // namespace apex::parallel
