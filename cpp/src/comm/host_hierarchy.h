// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// All-reduces between processes of several hosts: inside each host over memory, between the hosts
/// over the network.

#include <chrono>
#include <functional>
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
// An all-reduce has these stages, each on connections of its own:
//
//   1. the ranks of a host sum the message in their memory (HostChannel);
//   2. the ranks of a column (see Note [Columns]) each have their host's sum of one share, exchange
//      these, and sum them in the order of the hosts: with two hosts, or a small share, every rank
//      gets the whole share of every host; else every rank gets a piece of it of every host, sums
//      that, and
//   3. the sums of the pieces are gathered in the column;
//   4. every rank of a host gets the shares that its peers have (another HostChannel).
//
// On the network this is what an all-reduce in a ring of the hosts takes. A sum in a ring, however,
// begins at another host for each part of a message, so that with three hosts its bits depend on
// the size of buckets; here they do not, nor on the stage taken: (sum of host 0 + sum of host 1)
// + ..., each in the order of its ranks. float16 and bfloat16 are summed in float32 inside a host
// and between hosts, and rounded after each, since what travels has 16 bits. Averages are those of
// a host's ranks first, and then of the hosts: nothing overflows that would not in the end. They
// are to be had only where all hosts have as many ranks.
//
// Messages pass each stage in the order in which they were issued, on every rank; that is why a
// stage needs connections of its own: whether message 2 is in stage 1 before message 1 is in stage
// 4 differs from rank to rank.
//
// Somebody has to take a message from one stage to the next, while the rank computes, waits in
// another part of the program, or has failed and left zeros for the others. Over a channel alone
// peers can do the part of a rank that is away; but nobody else can use its connections. So there
// is a thread, as Gloo has some; it sleeps unless a message has arrived somewhere. It takes
// messages up to stage 4, and no further: who waits for the result reads it.

class HierarchyCore;
struct HierarchyOperation;

/// An all-reduce of a HostHierarchy. It makes progress on its own.
class HierarchyWork final : public SlicedWork {
 public:
  HierarchyWork(std::shared_ptr<HierarchyCore> core, std::shared_ptr<HierarchyOperation> operation);
  bool isCompleted() override;
  bool isSuccess() const override;
  /// @throws Error if a peer of this host has ended or says that it has failed; the network's error
  /// if that fails, or the timeout is over, which counts from where a stage begins, as Gloo's does.
  bool wait_for(std::chrono::milliseconds slice) override;

 private:
  const std::shared_ptr<HierarchyCore> core_;
  const std::shared_ptr<HierarchyOperation> operation_;
};

/// What the stages travel on.
struct HierarchyLinks {
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  std::shared_ptr<HostChannel> sums;     ///< stage 1; null where this rank is alone on its host
  std::shared_ptr<HostChannel> results;  ///< stage 4; so is this
  BackendPtr exchange;  ///< stage 2: the ranks of the column; null for ranks in none
  BackendPtr gather;    ///< stage 3; null, too, if there are two hosts
};

/// Thread safe.
class HostHierarchy {
 public:
  using WorkPtr = c10::intrusive_ptr<HierarchyWork>;

  HostHierarchy(HostLayout layout, HierarchyLinks links);
  /// What was issued is carried through, on another thread, unless something has failed.
  ~HostHierarchy();
  HostHierarchy(const HostHierarchy&) = delete;
  HostHierarchy& operator=(const HostHierarchy&) = delete;

  /// Whether averages can be had, or sums only.
  bool averages() const;

  /// `tensor` is contiguous, on the CPU, of a dtype and `op` that a HostChannel takes, AVG only if
  /// averages(), and stays as it is until the work has completed. `what`
  /// names it in errors. Does not wait for other ranks, as HostChannel::all_reduce() does not.
  /// @throws Error if one has failed before, or the process was forked since.
  WorkPtr all_reduce(const std::string& what, const at::Tensor& tensor,
                     c10d::ReduceOp::RedOpType op);

  /// A zeroed tensor, in memory from which all_reduce() copies nothing inside the host.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  /// Something has failed elsewhere: what was issued is not carried through.
  void give_up(const std::string& why) noexcept;

 private:
  std::shared_ptr<HierarchyCore> core_;
};

}  // namespace apex::parallel
