// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The recording of a backward, from which a plan is made. Pure.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel::detail {

/// The recording of one parameter in a backward. Combined over ranks by the maximum.
struct RecordedParameter {
  int32_t sparse_dim = 0;  ///< number of sparse dimensions of the gradient; 0: dense
  int32_t fired = 0;       ///< how often its gradient was accumulated
};

struct Recording {
  std::vector<RecordedParameter> parameters;
  std::vector<int64_t> ready_order;  ///< indices of one rank's fired parameters; when combined,
                                     ///< rank 0's order, then parameters that only others use
};

/// Encodes as [2 * parameters] int32, to be combined by the maximum over ranks.
at::Tensor encode(const Recording& recording);
/// Encodes the ready order as [parameters] int64, padded with -1.
at::Tensor encode_order(const Recording& recording);
/// @param used_by_any  by parameter: whether a rank has a gradient.
Recording decode(const at::Tensor& maximum, const at::Tensor& order_of_rank_0,
                 const std::vector<uint8_t>& used_by_any);

}  // namespace apex::parallel::detail
