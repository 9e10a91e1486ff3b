// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Which ranks share a host, and memory.

#include <chrono>
#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/host_channel.h"
#include "comm/host_hierarchy.h"

namespace apex::parallel {

// Note [Who can share memory]
//
// That two ranks are on one host is no reason to believe that they can share memory: containers
// have their own process numbers, users and security policies forbid it. So ranks try: each tells
// which boot of which host, which namespace of processes and which process it is, and where in its
// memory it has written a random number; each maps the memory of all others and reads the numbers.
// If any rank fails, none takes the channel, and each logs why.
//
// Ranks that do not say the same of boot and namespace are on different hosts, whether these are
// machines or containers. Then those of each host do the same among themselves, and connect to
// their counterparts on the others (Note [Columns]); if that fails anywhere, all ranks of all hosts
// keep to the process group.

/// How the ranks of a backend reach each other without it; both are null where they do not.
struct HostLinks {
  std::shared_ptr<HostChannel> channel;      ///< all ranks are on one host
  std::shared_ptr<HostHierarchy> hierarchy;  ///< they are on several, one of which has several
};

/// Connects the ranks of `backend`, which gathers on the CPU. Both links are null with
/// APEX_HOST_CHANNEL=0 on any rank, for ranks in one process, and for those that cannot share
/// memory; the same on all ranks. Collective; blocks for the timeout at most.
/// @param gloo   connects to the counterparts on other hosts; null: no hierarchy is made.
/// @param store  in which nothing has used the keys below "apex/hosts/".
/// @throws c10::Error, and what the backend throws.
HostLinks connect_host(c10d::Backend& backend, const c10::intrusive_ptr<c10d::Backend>& gloo,
                       const c10::intrusive_ptr<c10d::Store>& store,
                       std::chrono::milliseconds timeout);

}  // namespace apex::parallel
