// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include <apex/parallel/reducer.h>

#include "reducer/context.h"

namespace apex::parallel::detail {

// Note [Uneven inputs]
//
// A rank that has run out of data cannot know what the others do next: whether their next backward
// is synchronized, whether another forward comes first, or whether they have ended, too. So while
// ranks join, whoever has data announces each step in a small all-gather, to which a rank without
// data contributes zeros, and from which it learns what to take part in. Everything happens in the
// order of the announcements, so it is the same on every rank.

/// What a reducer knows of the join() that it is in.
struct UnevenInputs {
  bool divide_by_initial = true;  ///< averages are over all ranks, also those without data
  bool announces_ends = false;    ///< of backwards, since collectives of others came between
};

/// Blocks the host, as do the others. Collective.
/// @param active  this rank has data, and announces `kind` and `argument`.
/// @throws RankMismatch on every rank if those with data announce different things.
JoinEvent exchange_join_event(const ReducerContext& context, bool active, JoinEvent::Kind kind,
                              int64_t argument);

/// A rank that had data to the end, the same on every rank; -1: all had.
/// @param followed  this rank has taken part in what others announced.
/// @param states    how many states this rank takes over from that rank; RankMismatch on every rank
/// if they differ.
int64_t last_with_data(const ReducerContext& context, bool followed, int64_t states);

}  // namespace apex::parallel::detail
