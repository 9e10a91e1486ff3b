// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "transport/host_backend.h"

namespace apex::parallel {

// Note [A separate order of collectives]
//
// Collectives of a process group are matched by the order in which each rank issues them. A reducer
// issues its collectives when gradients are ready, from autograd's threads. Other users of the
// group, such as another reducer or a collective in the module, may precede a bucket on one rank
// and follow it on another, for example because a layer was unused or frozen there. Collectives of
// equal size are then swapped silently. So a reducer has separate connections, on which it alone
// determines the order.

/// Creates a group over the same ranks as `parent`, with the same timeout and, for CPU tensors, its
/// own channel in shared memory or its own connections. Backends other than Gloo, such as NCCL, are
/// shared with `parent`: communicators that run concurrently on one GPU may deadlock. Returns
/// `parent` if there is nothing to separate (one rank, no store, or no Gloo). The group is not
/// registered under a name and ends with its last reference.
///
/// Collective over `parent`, with the same arguments on every rank. Blocks until all ranks have
/// joined.
/// @param name      must be new in the parent's store.
/// @param connects  whether ranks that do not share memory get new connections; otherwise they use
///                  the parent's.
/// @throws CommunicationError if ranks do not join: a process has exited, or on timeout.
c10::intrusive_ptr<c10d::ProcessGroup> make_separate_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& parent, const std::string& name,
    bool connects = true);

/// The backend "apex" between the ranks of `group`: the group's own backend, or one that the first
/// call attaches to a group over Gloo if all its ranks share memory; otherwise null. The first call
/// is collective and blocks. Thread safe.
/// @throws CommunicationError in the first call.
c10::intrusive_ptr<HostBackend> host_backend_of(const c10d::ProcessGroup& group);

}  // namespace apex::parallel
