// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What a rank has recorded in a backward, to make a plan from. Pure.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel::detail {

/// What a rank has seen of one parameter in a backward that it recorded; of all ranks, the maximum.
struct RecordedParameter {
  int32_t sparse_dim = 0;  ///< over how many of its dimensions the gradient is sparse; 0: dense
  int32_t fired = 0;       ///< how often
  bool in_parts = false;   ///< the gradient consists of several tensors
};

struct Recording {
  std::vector<RecordedParameter> parameters;
  std::vector<int64_t> ready_order;  ///< indices: of a rank, those that fired; of all, rank 0's
                                     ///< order, then what other ranks use
};

/// [3 * parameters] int32, to be combined by the maximum over ranks.
at::Tensor encode(const Recording& recording);
/// [parameters] int64: the ready order, then -1.
at::Tensor encode_order(const Recording& recording);
/// @param used_by_any  by parameter: some rank has a gradient.
Recording decode(const at::Tensor& maximum, const at::Tensor& order_of_rank_0,
                 const std::vector<uint8_t>& used_by_any);

}  // namespace apex::parallel::detail
