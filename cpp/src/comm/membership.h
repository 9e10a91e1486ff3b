// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The ranks that train together, and small control messages between them.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "watch/process_state.h"

namespace apex::parallel {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// A control message in flight: the combination of a small tensor of every rank.
class ControlMessage {
 public:
  ControlMessage() = default;
  /// Without `work` the result is already complete (one rank).
  ControlMessage(std::string what, GroupPtr group, c10::intrusive_ptr<c10d::Work> work,
                 at::Tensor result)
      : what_(std::move(what)),
        group_(std::move(group)),
        work_(std::move(work)),
        result_(std::move(result)) {}

  explicit operator bool() const { return result_.defined(); }

  /// The result, on the CPU. Blocks the host. `meanwhile`: see wait_collective().
  /// @throws CommunicationError.
  at::Tensor wait(const std::function<void()>& meanwhile = {}) const;

  /// For a message on a device: the current stream waits for it, the host does not.
  void order() const;

  /// Whether wait() would return immediately without throwing. Does not block.
  bool arrived() const;

 private:
  std::string what_;
  GroupPtr group_;
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor result_;
};

/// A set of ranks and the groups that connect them. A value type; groups may be replaced by others
/// over the same ranks.
struct Membership {
  std::shared_ptr<void> kept;    ///< see Note [The last reference to a group]
  GroupPtr parent;               ///< the group that the user passed
  std::vector<GroupPtr> groups;  ///< carry buckets, in turn; empty after release()
  bool shares_groups = true;     ///< with other users of `parent`, also for CPU tensors
  int64_t pid = this_pid();      ///< of the process whose groups these are
  int rank = 0;
  int size = 1;
  at::Device device =
      at::Device(at::kCPU);  ///< device of control messages if a group has no CPU backend

  Membership() = default;
  explicit Membership(std::vector<GroupPtr> given);

  /// Replaces `groups` by separate communicators where the backend supports it; see
  /// make_separate_group(). Collective.
  /// @param on_cpu  whether buckets are on the CPU; true on any rank counts for all.
  /// @throws CommunicationError.
  void separate(bool on_cpu);
  bool released() const { return groups.empty(); }
  void release();
  bool alone() const { return size == 1; }
  const GroupPtr& control() const { return groups.front(); }
  const GroupPtr& group_of(size_t bucket) const { return groups[bucket % groups.size()]; }

  /// Issue a message over control(). `mine` is a small tensor on any device, of equal shape on
  /// every rank. With one rank no backend is called. Errors name `what`.
  /// @throws CommunicationError.
  ControlMessage all_reduce(const std::string& what, const at::Tensor& mine,
                            c10d::ReduceOp::RedOpType op) const;
  /// [size * numel], in rank order; stored in `gathered` if that is defined.
  ControlMessage all_gather(const std::string& what, const at::Tensor& mine,
                            const at::Tensor& gathered = {}) const;

  at::Device control_device() const;

 private:
  void keep(std::vector<GroupPtr> separate = {});
};

}  // namespace apex::parallel
