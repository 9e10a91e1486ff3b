// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace apex::testing {

using ReduceOpType = c10d::ReduceOp::RedOpType;

/// A collective as issued by one rank.
struct CollectiveRecord {
  /// Position in this rank's order of collectives on the group, from 0.
  uint64_t seq = 0;
  /// "allreduce", "broadcast", "allgather", "_allgather_base" or "alltoall_base".
  std::string op;
  /// Elements that this rank contributes.
  int64_t numel = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;
  /// UNUSED for collectives without a reduction.
  ReduceOpType reduce_op = ReduceOpType::UNUSED;
  /// Root rank of a broadcast, else -1.
  int64_t root = -1;
  /// asyncOp in the options of all-reduces and of `_allgather_base`.
  bool async_op = true;
  /// Address of this rank's input.
  const void* data_ptr = nullptr;
  /// Shape of this rank's input.
  std::vector<int64_t> sizes;

  /// For messages, e.g. "allreduce(SUM) of Float [4, 2]".
  std::string describe() const;
};

/// One rank's contribution to a collective: a tensor, or one for each rank.
struct Contribution {
  CollectiveRecord record;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  /// Copies of the inputs at issue time, to detect a write to a buffer that is still being reduced.
  std::vector<at::Tensor> snapshots;
};

/// Runs a collective. `contributions[r]` is rank r's. Reductions are computed in the tensors' dtype
/// as ((rank 0 + rank 1) + rank 2) + ..., so every run has the same bits. Throws if an input has
/// changed since it was issued.
void run_collective(const std::vector<Contribution>& contributions);

/// The meeting point of one group's ranks, with which tests control their collectives. Every
/// function may be called from any thread at any time, before or after the collective was issued.
/// `seq` counts a rank's collectives on this group from 0.
class ThreadBackendControl final : public std::enable_shared_from_this<ThreadBackendControl> {
 public:
  static std::shared_ptr<ThreadBackendControl> create(int world_size);
  ~ThreadBackendControl();
  ThreadBackendControl(const ThreadBackendControl&) = delete;
  ThreadBackendControl& operator=(const ThreadBackendControl&) = delete;

  int world_size() const;

  // --- faults ---

  /// wait() on collective `seq` throws `message` on every rank; no tensor is changed.
  void fail(uint64_t seq, const std::string& message);
  /// The call that issues collective `seq` on `rank` throws `message`; wait() on the other ranks
  /// reports that.
  void fail_on_issue(uint64_t seq, int rank, const std::string& message);
  /// Every pending and every later collective fails with `message` on every rank.
  void abort(const std::string& message);
  /// `rank` will issue no more collectives: collectives that need it fail immediately.
  void leave(int rank);

  // --- observation ---

  /// The collectives that `rank` has issued so far, in order.
  std::vector<CollectiveRecord> log(int rank) const;
  /// Number of collectives that `rank` has issued, in total or of one kind (`op` as in
  /// CollectiveRecord).
  size_t issued(int rank) const { return log(rank).size(); }
  size_t issued(int rank, const std::string& op) const;

  // --- for ThreadBackend ---

  c10::intrusive_ptr<c10d::Work> issue(int rank, c10d::OpType type, Contribution contribution);
  /// "rank 1 has issued only 3 collectives": for messages.
  std::string describe_pending(uint64_t seq) const;

 private:
  struct State;
  explicit ThreadBackendControl(std::shared_ptr<State> state);

  const std::shared_ptr<State> state_;
  std::thread worker_;
};

}  // namespace apex::testing
