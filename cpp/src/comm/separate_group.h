// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

namespace apex::parallel {

// Note [An order of one's own]
//
// Collectives of a process group are matched by the order in which each rank issues them. A reducer
// issues its own when gradients are ready, from autograd's threads, and whatever else uses the
// group, another reducer or a collective in the module, may come before a bucket on one rank and
// after it on another: because a layer was not used there, or is frozen. Collectives of equal size
// are then swapped without a word. So the traffic of a reducer has connections of its own, on which
// the order is the reducer's alone.

/// A group over the same ranks as `parent`, with connections of its own for CPU tensors and the
/// same timeout. Backends other than Gloo, as NCCL, are shared with `parent`: communicators that
/// run at the same time on one GPU may wait for each other. Returns `parent` if there is nothing to
/// separate: one rank, no store, no Gloo. Not registered under a name; ends with its last
/// reference.
///
/// Collective over `parent`, every rank with the same `name`, which must be new in the parent's
/// store. Blocks until all ranks have come.
/// @throws CommunicationError if they do not: a process has ended, or time is up.
c10::intrusive_ptr<c10d::ProcessGroup> make_separate_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& parent, const std::string& name);

/// Connects some of the ranks of `parent`, this one as `rank` of `size`, by connections of their
/// own, for CPU tensors over Gloo, which `parent` has to have. Collective over these ranks, every
/// one with the same `name`, which must be new in the parent's store. Blocks until all of them have
/// come. Not registered under a name; to be ended by end_elsewhere().
/// @throws CommunicationError as make_separate_group().
c10::intrusive_ptr<c10d::ProcessGroup> connect_some(
    const c10::intrusive_ptr<c10d::ProcessGroup>& parent, const std::string& name, int rank,
    int size);

/// Calls `end` on a thread of its own: see Note [Where a group ends].
/// @param may_be_stuck  the end of the process does not wait for it.
void end_elsewhere(std::function<void()> end, bool may_be_stuck) noexcept;

/// Blocks until all separate groups whose last reference was dropped have ended; see Note [Where a
/// group ends]. Not to be called under the interpreter's lock.
APEX_API void finish_dropped_groups();

}  // namespace apex::parallel
