// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
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

/// The pieces of a parameter, in order.
/// @throws InvalidArgument for a parameter that is not sharded.
using FindPieces = std::function<std::vector<PieceOfRank>(const at::Tensor& parameter)>;

/// See ParameterShards::comm_hook().
std::shared_ptr<CommHook> make_shard_hook(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                          FindPieces find);

}  // namespace apex::parallel
