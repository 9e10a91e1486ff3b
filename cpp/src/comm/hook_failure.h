// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Communication hooks that fail: on every rank, or on some only.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/group_record.h"
#include "comm/membership.h"

namespace apex::parallel {

// Note [Hooks that fail]
//
// A rank whose communication hook has failed has not issued the collective in which the hooks of
// the others may be waiting. Whatever it sends next over that communicator would be taken for it.
// So it sends nothing, says through the store in which call it has failed, and looks there what the
// others say:
//
// - all hooks have failed in the same call: nobody waits for anything, and all can go on;
// - a rank that waits for something behind that call, or for the hook in it, has heard, has given
//   up, and says so. Then the messages of the ranks do not match any more.
//
// A rank that waits for something before that call goes on waiting: it will come.

/// What a rank waits for, as what hooks_failed_alike() compares it with.
enum class Waiting { kInCollective, kForHook };

/// For a rank whose communication hook has failed in `what`, the last call of `group`, one of the
/// `groups` of a reducer: tells the others, with the `cause`, and returns whether the hooks of all
/// ranks have failed there. If not, the groups have failed. Blocks until the others are there, for
/// the group's timeout at most. For groups that hears_reports() is true of.
///
/// `begun`: the hook may have issued its collective. Then the others are waited for less long.
bool hooks_failed_alike(const std::vector<GroupPtr>& groups, const GroupPtr& group,
                        const std::string& what, const std::string& cause, bool begun);

/// Which hook has failed on other ranks in a call that this rank has got past; empty if none has.
/// Blocks as the store does. `call` is the number of the last call of the rank that waits.
std::string failed_hook(c10d::Store& store, const GroupRecord& record, int64_t call,
                        Waiting waiting);

}  // namespace apex::parallel
