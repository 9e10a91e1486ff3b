// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// All-reduces between processes of several hosts: over shared memory inside each host, over the
/// network between hosts.

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "transport/host_channel.h"
#include "transport/host_layout.h"

namespace apex::parallel {

// Note [Sums over several hosts]
//
// Every host has the same number of ranks. An all-reduce is three collectives in a row: the ranks
// of a host sum the message in shared memory, each rank all-reduces one share of the sum with the
// ranks of the same position on the other hosts, over Gloo, and the ranks of a host gather the
// shares in shared memory. So one copy of a message travels for each host, instead of one for each
// rank. All three are one job of the host's channel.

/// All-reduces over several hosts; see Note [Sums over several hosts]. Thread safe.
class HostHierarchy {
 public:
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

  /// As HostChannel::all_reduce().
  HostChannel::WorkPtr all_reduce(HostCall call, const at::Tensor& tensor,
                                  c10d::ReduceOp::RedOpType op);

  /// The channel between the ranks of this host.
  HostChannel& host() const { return *host_; }

 private:
  const std::shared_ptr<const HostLayout> layout_;
  std::shared_ptr<HostChannel> host_;
  c10::intrusive_ptr<c10d::Backend> column_;
};

}  // namespace apex::parallel
