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

#include "comm/host_channel.h"
#include "comm/host_layout.h"

namespace apex::parallel {

// Note [Sums over several hosts]
//
// An all-reduce has these stages, each with its own connections:
//
//   1. The ranks of a host sum the message in shared memory (HostChannel).
//   2. Each rank of a column (see Note [Columns]) holds its host's sum of one share. The column
//      exchanges these and sums them in host order. With two hosts, or for a small share, every
//      rank receives every host's whole share. Otherwise every rank receives and sums one piece of
//      it.
//   3. The sums of the pieces are gathered in the column.
//   4. Every rank of a host gets the shares that its peers have (another HostChannel).
//
// The network traffic is that of a ring all-reduce between hosts. But a ring starts the sum of each
// part of a message at another host, so with three hosts the bits of the result depend on the
// bucket size. Here they depend neither on the bucket size nor on the path taken: the result is
// (sum of host 0 + sum of host 1) + ..., each in rank order. float16 and bfloat16 are summed in
// float32 inside a host and between hosts, and rounded after each of the two, since messages are
// 16-bit. AVG averages over a host's ranks first and then over hosts, so it overflows only if the
// result does. AVG requires the same number of ranks on every host.
//
// On every rank, messages pass each stage in the order of issue. Each stage needs its own
// connections, because ranks differ in whether message 2 enters stage 1 before message 1 enters
// stage 4.
//
// A message must move from stage to stage while the rank computes, waits elsewhere, or has failed
// and left zeros for the others. In a channel, peers can do an absent rank's part, but they cannot
// use its network connections. So there is a thread, as in Gloo, which sleeps until a message
// arrives. It moves messages up to stage 4; the caller that waits for the result completes stage 4.

class HierarchyCore;
struct HierarchyOperation;

/// An all-reduce of a HostHierarchy. It makes progress on its own.
class HierarchyWork final : public SlicedWork {
 public:
  HierarchyWork(std::shared_ptr<HierarchyCore> core, std::shared_ptr<HierarchyOperation> operation);
  bool isCompleted() override;
  /// @throws Error if a peer of this host has exited or reported a failure; the network's error if
  ///         that fails or the timeout has passed. As in Gloo, the timeout restarts with each
  ///         stage.
  bool wait_for(std::chrono::milliseconds slice) override;

 private:
  const std::shared_ptr<HierarchyCore> core_;
  const std::shared_ptr<HierarchyOperation> operation_;
};

/// The connections of the stages.
struct HierarchyLinks {
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  std::shared_ptr<HostChannel> sums;     ///< stage 1; null if this rank is alone on its host
  std::shared_ptr<HostChannel> results;  ///< stage 4; null in the same case
  BackendPtr exchange;  ///< stage 2, among the ranks of the column; null for ranks outside columns
  BackendPtr gather;    ///< stage 3; also null with two hosts
};

/// All-reduces over several hosts; see Note [Sums over several hosts]. Thread safe.
class HostHierarchy {
 public:
  using WorkPtr = c10::intrusive_ptr<HierarchyWork>;

  HostHierarchy(HostLayout layout, HierarchyLinks links);
  /// Issued collectives are completed on another thread, unless something has failed.
  ~HostHierarchy();
  HostHierarchy(const HostHierarchy&) = delete;
  HostHierarchy& operator=(const HostHierarchy&) = delete;

  /// Whether AVG is supported, or SUM only.
  bool averages() const;

  /// `tensor` is contiguous, on the CPU, of a dtype and `op` that a HostChannel takes (AVG only if
  /// averages()), and must not change until the work has completed. `what` names it in errors. Like
  /// HostChannel::all_reduce(), does not wait for other ranks.
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
