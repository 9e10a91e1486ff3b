// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Reductions over ranks, directly on their messages.

#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace apex::parallel {

/// Whether combine() supports it: sum, product, minimum and maximum of real dtypes, averages of
/// floating-point dtypes, and bitwise operations of integer dtypes. float16 and bfloat16 are
/// combined in float32 and rounded once.
bool can_combine(c10d::ReduceOp::RedOpType op, at::ScalarType dtype);

/// Combines `numel` elements at the pointers `from` (one per rank), in this order, and writes the
/// result to each pointer of `to`. `to` may repeat pointers of `from`; nothing else may overlap. An
/// element's bits do not depend on its position or on `numel`. Uses torch's intra-op threads for
/// large inputs.
void combine(c10d::ReduceOp::RedOpType op, at::ScalarType dtype, int64_t numel,
             const std::vector<const char*>& from, const std::vector<char*>& to);

}  // namespace apex::parallel
