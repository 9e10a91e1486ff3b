// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>

namespace apex::parallel {

/// Where ranks have different numbers of batches (join()), those that have run out of data hear of
/// every collective before it begins, and take part in it. A reducer hears its own; this is for
/// those that know no reducer. One owner at a time, the last. Thread safe.
void set_announcer(const void* owner, std::function<void(int64_t)> announce);
void clear_announcer(const void* owner);

/// This rank is about to issue a collective, which the argument tells. Waits for the other ranks;
/// does nothing outside of join().
void announce_collective(int64_t argument);

/// Whether announce_collective() has somebody to tell: this rank is under join() and has data.
bool announces_collectives();

}  // namespace apex::parallel
