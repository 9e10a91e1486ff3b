// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Finds out which ranks share a host and can share memory.

#include <chrono>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/host_channel.h"
#include "watch/process_state.h"

namespace apex::parallel {

// Note [Who can share memory]
//
// Two ranks on one host cannot always share memory: containers have their own process ids, and
// users and security policies may forbid it. So the ranks test it. Each sends the boot id of its
// host, its process namespace and id, and the location of a random number in its memory. Each maps
// the memory of all others and reads the numbers. If any rank fails, no rank uses the channel, and
// each logs the reason.
//
// Ranks with different boot ids or namespaces count as being on different hosts, even if they are
// in containers on one host. If every host has the same number of ranks, the ranks of each host
// run the same test among themselves, and connect to the ranks of the same position on the other
// hosts. If that fails anywhere, all ranks of all hosts use the process group.

/// Direct links between the ranks of a backend.
struct HostLinks {
  std::shared_ptr<HostChannel> channel;  ///< between the ranks of this host; may be null
  /// Between the ranks of this position on all hosts, if there are several; see
  /// Note [Sums over several hosts].
  c10::intrusive_ptr<c10d::Backend> column;
  c10::intrusive_ptr<c10d::Backend> gloo;  ///< between all ranks; not set by connect_host()
  std::vector<ProcessName> processes;      ///< of the ranks; empty: unknown
};

/// Connects the ranks of `backend`, which supports all-gather on the CPU. Both links are null if a
/// rank has APEX_HOST_CHANNEL=0, if ranks are in one process, if they cannot share memory, or if
/// the hosts have one rank each or different numbers of ranks. The result is the same on all ranks.
/// Collective; blocks for at most the timeout.
/// @param gloo   its options connect the hosts; null: several hosts are not connected.
/// @param store  no other code may use its keys below "apex/hosts/".
/// @throws c10::Error; exceptions of the backend.
HostLinks connect_host(c10d::Backend& backend, const c10::intrusive_ptr<c10d::Backend>& gloo,
                       const c10::intrusive_ptr<c10d::Store>& store,
                       std::chrono::milliseconds timeout);

}  // namespace apex::parallel
