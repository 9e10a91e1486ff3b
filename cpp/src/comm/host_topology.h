// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Which ranks share a host, and memory.

#include <chrono>
#include <memory>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

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

/// The channel between the ranks of `group`, made at the first call; null where they have none:
/// APEX_HOST_CHANNEL=0 on any rank, ranks on different hosts, in one process, or that cannot share
/// memory, a group of one rank or without Gloo. The same on all ranks. The first call is collective
/// and blocks. Thread safe.
/// @throws CommunicationError in the first call.
std::shared_ptr<HostChannel> host_channel_of(const c10d::ProcessGroup& group);

/// A channel of one rank; null where host_channel_of() would be.
std::shared_ptr<HostChannel> channel_of_one(std::chrono::milliseconds timeout);

/// The hierarchy for sums of a group whose ranks are on several hosts, of which one has several;
/// null where they have none, as above, and for groups on one host. For groups that only this
/// package uses: it makes connections, which end with drop_host_channel(). The same on all ranks.
/// The first call is collective, and blocks. Thread safe.
/// @throws CommunicationError in the first call.
std::shared_ptr<HostHierarchy> host_hierarchy_of(const c10d::ProcessGroup& group);

/// The same where host_hierarchy_of() has been called, else null. Does not block.
std::shared_ptr<HostHierarchy> find_host_hierarchy(const c10d::ProcessGroup& group);

/// `group` is ending: so do its channel and its hierarchy, and peers that wait there hear of it.
void drop_host_channel(const c10d::ProcessGroup& group) noexcept;

}  // namespace apex::parallel
