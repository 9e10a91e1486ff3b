// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/parallel/comm_hook.h>

namespace apex::parallel {

/// A part of a parameter that `rank` steps: elements [begin, end), in memory order.
struct PieceOfRank {
  int64_t rank = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

struct PiecesOfParameter {
  at::Tensor parameter;
  std::vector<PieceOfRank> pieces;
};
using PiecesOfAll = std::unordered_map<const c10::TensorImpl*, PiecesOfParameter>;

/// See ParameterShards::comm_hook(). The hook keeps the pieces: when an optimizer is collected
/// differs by rank, and the first backward with another hook may still use this one.
std::shared_ptr<CommHook> make_shard_hook(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                          std::vector<std::shared_ptr<const PiecesOfAll>> all);

}  // namespace apex::parallel
