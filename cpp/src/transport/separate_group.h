// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "transport/host_backend.h"

namespace apex::parallel {

// Note [An order of one's own]
//
// Collectives of a process group are matched by the order in which each rank issues them. A reducer
// issues its own when gradients are ready, from autograd's threads, and whatever else uses the
// group, another reducer or a collective in the module, may come before a bucket on one rank and
// after it on another: because a layer was not used there, or is frozen. Collectives of equal size
// are then swapped without a word. So the traffic of a reducer has connections of its own, on which
// the order is the reducer's alone.

/// A group over the same ranks as `parent`, with a channel in shared memory, or connections, of its
/// own for CPU tensors and the same timeout. Backends other than Gloo, as NCCL, are shared with
/// `parent`: communicators that run at the same time on one GPU may wait for each other. Returns
/// `parent` if there is nothing to separate: one rank, no store, no Gloo. Not registered under a
/// name; ends with its last reference.
///
/// Collective over `parent`, every rank with the same arguments. Blocks until all ranks have come.
/// @param name      must be new in the parent's store.
/// @param connects  whether ranks that do not share memory are worth a connection to each other;
/// else they share the parent's.
/// @throws CommunicationError if they do not: a process has ended, or time is up.
c10::intrusive_ptr<c10d::ProcessGroup> make_separate_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& parent, const std::string& name,
    bool connects = true);

/// The backend "apex" between the ranks of `group`: its own, or one that was attached to a group
/// over Gloo, at the first call, where all its ranks share memory; else null. The first call is
/// collective, and blocks. Thread safe.
/// @throws CommunicationError in the first call.
c10::intrusive_ptr<HostBackend> host_backend_of(const c10d::ProcessGroup& group);

}  // namespace apex::parallel
