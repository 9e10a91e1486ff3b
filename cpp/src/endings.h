// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>

#include <apex/export.h>

namespace apex::parallel {

// Note [Where a group ends]
//
// A Gloo backend joins its threads when it is destroyed. These threads may have to release Python
// objects that were current when a collective was issued. The last reference to the group may be
// dropped by a thread that holds the GIL: when a graph is freed, or a wrapper or a communication
// hook is collected. So the backend is destroyed on a separate thread. The end of the process, or
// any caller that can wait without a lock, waits for that thread.

/// Calls `end` on a separate thread; see Note [Where a group ends].
/// @param may_be_stuck  the end of the process waits at most one second for it.
void end_elsewhere(std::function<void()> end, bool may_be_stuck) noexcept;

/// Blocks until all separate groups whose last reference was dropped are destroyed; see
/// Note [Where a group ends]. The caller must not hold the GIL.
APEX_API void finish_dropped_groups();

}  // namespace apex::parallel
