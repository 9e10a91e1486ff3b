// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What a rank has recorded in a backward, to make a plan from. Pure.

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel::detail {

/// What a rank has seen of one parameter in a backward that it recorded.
struct RecordedParameter {
  bool used = false;       ///< there is a gradient
  int32_t sparse_dim = 0;  ///< over how many of its dimensions the gradient is sparse; 0: dense
  int32_t fired = 0;       ///< how often
  bool trainable = false;
  bool in_parts = false;  ///< the gradient consists of several tensors
};

struct Recording {
  std::vector<RecordedParameter> parameters;
  std::vector<int64_t> ready_order;  ///< indices, those that fired
  uint32_t facts = 0;                ///< of this step, see StepFacts
  std::string settings;  ///< those that may change between backwards, and all ranks must share
};

/// What holds on some rank, with the largest numbers; and rank 0's order.
struct AgreedRecording {
  std::vector<RecordedParameter> parameters;
  std::vector<int64_t> ready_order;  ///< parameters with a gradient on some rank
  uint32_t facts = 0;
  bool same_settings = true;
};

/// [5 * parameters + StepFacts::kCount + 2] int32, to be combined by the maximum over ranks.
at::Tensor encode(const Recording& recording);
/// [parameters] int64: the ready order, then -1.
at::Tensor encode_order(const Recording& recording);
AgreedRecording decode(const at::Tensor& maximum, const at::Tensor& order_of_rank_0);

}  // namespace apex::parallel::detail
