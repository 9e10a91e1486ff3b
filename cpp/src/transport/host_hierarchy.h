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

namespace apex::parallel {

// Note [Sums over several hosts]
//
// Every host has the same number of ranks. An all-reduce is three collectives in a row: the ranks
// of a host sum the message in shared memory, each rank all-reduces one share of the sum with the
// ranks of the same position on the other hosts, over Gloo, and the ranks of a host gather the
// shares in shared memory. So one copy of a message travels for each host, instead of one for each
// rank. All three are one job of the host's channel.

/// Whether sum_over_hosts() takes it: what both a HostChannel and Gloo take, without AVG.
bool can_sum_over_hosts(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);

/// The job of an all-reduce; see Note [Sums over several hosts].
/// @param host    connects the ranks of this host.
/// @param column  connects the ranks of this position on all hosts.
HostChannel::JobPtr sum_over_hosts(std::shared_ptr<HostChannel> host,
                                   c10::intrusive_ptr<c10d::Backend> column,
                                   const std::string& what, const at::Tensor& tensor,
                                   c10d::ReduceOp::RedOpType op);

}  // namespace apex::parallel
