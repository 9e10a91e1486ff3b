// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// All-reduces between processes of several hosts: over shared memory inside each host, over the
/// network between hosts.

#include <chrono>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "transport/host_channel.h"
#include "transport/host_layout.h"

namespace apex::parallel {

// Note [Sums over several hosts]
//
// Every host has the same number of ranks. The ranks of a host sum a message in shared memory. Then
// each rank all-reduces one share of the sum with the ranks of the same position on the other
// hosts, over Gloo, and sends the result to the ranks of its host, in shared memory. So one copy of
// a message travels for each host, instead of one for each rank.
//
// A thread makes these calls for one message after the other, in the order of issue, because a
// message must make progress while its rank computes, waits elsewhere, or has failed and left zeros
// for the others.

class HierarchyCore;
struct HierarchyOperation;

/// An all-reduce of a HostHierarchy. It makes progress on its own.
class HierarchyWork final : public SlicedWork {
 public:
  HierarchyWork(std::shared_ptr<HierarchyCore> core, std::shared_ptr<HierarchyOperation> operation);
  bool isCompleted() override;
  /// @throws Error if a peer of this host has exited or reported a failure; the network's error if
  ///         that fails or the timeout has passed.
  bool wait_for(std::chrono::milliseconds slice) override;

 private:
  const std::shared_ptr<HierarchyCore> core_;
  const std::shared_ptr<HierarchyOperation> operation_;
};

/// All-reduces over several hosts; see Note [Sums over several hosts]. Thread safe.
class HostHierarchy {
 public:
  using WorkPtr = c10::intrusive_ptr<HierarchyWork>;

  /// @param host    connects the ranks of this host.
  /// @param column  connects the ranks of this position on all hosts.
  HostHierarchy(HostLayout layout, std::shared_ptr<HostChannel> host,
                c10::intrusive_ptr<c10d::Backend> column);
  /// Issued collectives are completed on another thread, unless something has failed.
  ~HostHierarchy();
  HostHierarchy(const HostHierarchy&) = delete;
  HostHierarchy& operator=(const HostHierarchy&) = delete;

  /// Whether all_reduce() takes it: what both a HostChannel and Gloo take, without AVG.
  static bool can_all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);

  /// `tensor` is contiguous, on the CPU, and must not change until the work has completed. `what`
  /// names it in errors. Does not wait for other ranks.
  /// @throws Error if an earlier one has failed, or in a process forked since.
  WorkPtr all_reduce(const std::string& what, const at::Tensor& tensor,
                     c10d::ReduceOp::RedOpType op);

  /// A zeroed tensor in memory that all_reduce() does not copy inside the host.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  /// Abandons issued collectives after a failure elsewhere.
  void give_up(const std::string& why) noexcept;

 private:
  std::shared_ptr<HierarchyCore> core_;
};

}  // namespace apex::parallel
