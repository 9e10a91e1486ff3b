#pragma once

/// Which ranks share a host, and memory.

#include <memory>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/host_channel.h"

namespace apex::parallel {

// Note [Who can share memory]
//
// That two ranks are on one host is no reason to believe that they can share memory: containers
// have their own process numbers, users and security policies forbid it. So ranks try: each tells
// which boot of which host, which namespace of processes and which process it is, and where in its
// memory it has written a random number; each maps the memory of all others and reads the numbers.
// If any rank fails, none takes the channel, and each logs why.

/// The channel between the ranks of `group`, made at the first call; null where they have none:
/// APEX_HOST_CHANNEL=0 on any rank, ranks on different hosts, in one process, or that cannot share
/// memory, a group of one rank or without Gloo. The same on all ranks. The first call is collective
/// and blocks. Thread safe.
/// @throws CommunicationError in the first call.
std::shared_ptr<HostChannel> host_channel_of(const c10d::ProcessGroup& group);

/// `group` is ending: so does its channel, and peers that wait in it hear of it.
void drop_host_channel(const c10d::ProcessGroup& group) noexcept;

}  // namespace apex::parallel
