// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>

namespace apex::parallel {

/// Announcements of collectives under join(), where ranks have different numbers of batches: ranks
/// without data receive each announcement and take part in the collective. A reducer announces its
/// own collectives; this is for code without a reducer. A new owner replaces the previous owner.
/// Thread safe.
void set_announcer(const void* owner, std::function<void(int64_t)> announce);
void clear_announcer(const void* owner);

/// Announces the collective that this rank is about to issue, as described by `argument`. Waits for
/// the other ranks; does nothing outside of join().
void announce_collective(int64_t argument);

/// Whether announce_collective() has an effect: this rank is under join() and has data.
bool announces_collectives();

}  // namespace apex::parallel
