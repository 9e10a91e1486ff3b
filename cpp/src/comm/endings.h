// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

#include <apex/export.h>

namespace apex::parallel {

// Note [Where a group ends]
//
// A Gloo backend ends by joining its threads, and these may have to let go of Python objects that
// were current when a collective was issued. Whoever drops the last reference to the group may hold
// the interpreter's lock: a graph that is freed, a wrapper or a communication hook that is
// collected. So the backend ends on a thread of its own, and the end of the process, or whoever can
// wait without a lock, waits for that thread.

/// Calls `end` on a thread of its own: see Note [Where a group ends].
/// @param may_be_stuck  the end of the process waits for it for a second at most.
void end_elsewhere(std::function<void()> end, bool may_be_stuck) noexcept;

/// Blocks until all separate groups whose last reference was dropped have ended; see Note [Where a
/// group ends]. Not to be called under the interpreter's lock.
APEX_API void finish_dropped_groups();

}  // namespace apex::parallel
