// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// The arithmetic of ThreadBackend's collectives: no threads, no state.

namespace apex::testing {

using ReduceOpType = c10d::ReduceOp::RedOpType;

/// A collective as issued by one rank.
struct CollectiveRecord {
  /// Position in this rank's order of collectives on the group, from 0.
  uint64_t seq = 0;
  /// "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base",
  /// "allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base", "alltoall_base"
  /// or "barrier".
  std::string op;
  /// Elements that this rank contributes, over all tensors.
  int64_t numel = 0;
  /// Type of the first tensor; Undefined for a barrier.
  at::ScalarType dtype = at::ScalarType::Undefined;
  /// UNUSED for collectives without a reduction.
  ReduceOpType reduce_op = ReduceOpType::UNUSED;
  /// Root rank of broadcast and reduce, else -1.
  int64_t root = -1;
  /// asyncOp in the options of all-reduces and of `_allgather_base`.
  bool async_op = true;
  /// Address of the first input tensor on this rank.
  const void* data_ptr = nullptr;
  /// Number of input tensors.
  int64_t tensor_count = 0;
  /// Sizes of every input tensor.
  std::vector<std::vector<int64_t>> sizes;

  /// For messages, e.g. "allreduce(SUM) of Float [4, 2]".
  std::string describe() const;
};

/// One rank's contribution to a collective. `inputs[i]` and `outputs[i]` belong to the i-th tensor.
/// A tensor that is exchanged in world-size pieces has one entry per rank; others have one entry.
struct Contribution {
  CollectiveRecord record;
  std::vector<std::vector<at::Tensor>> inputs;
  std::vector<std::vector<at::Tensor>> outputs;
  /// Copies of the inputs at issue time, to detect a write to a buffer that is still being reduced.
  std::vector<at::Tensor> snapshots;
};

/// Throws if a tensor is not a dense CPU tensor or `op` does not support its dtype, as real
/// backends do.
void check_contribution(const Contribution& contribution);

/// Fills `contribution.snapshots` and the fields of `contribution.record` that follow from the
/// tensors.
void complete_contribution(Contribution& contribution);

/// Why two ranks cannot be in the same collective; nullopt if they can.
std::optional<std::string> find_mismatch(int rank_a, const CollectiveRecord& a, int rank_b,
                                         const CollectiveRecord& b);

/// Runs a collective. `contributions[r]` is rank r's. Reductions are computed in the tensors' dtype
/// as ((rank 0 + rank 1) + rank 2) + ..., so every run has the same bits. Throws if an input has
/// changed since it was issued.
void run_collective(std::vector<Contribution>& contributions);

}  // namespace apex::testing
