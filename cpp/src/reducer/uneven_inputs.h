// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>

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

/// A reducer's part of join(). What is collective blocks the host, and takes the right to change
/// the reducer (see Note [Who may touch a reducer]); for the rest the caller has that.
class UnevenInputs {
 public:
  UnevenInputs(ReducerContext& context, const void* owner) : context_(context), owner_(owner) {}

  /// @param announce  called by collectives of others that ranks without data have to hear of.
  void begin(bool divide_by_initial_world_size, std::function<void(int64_t)> announce);
  /// This rank has run out of data: it announces nothing any more. Thread safe.
  void follow();
  void end();

  /// What this rank does next, for those that have no data. Collective, as the next.
  /// @throws RankMismatch on every rank if those with data announce different things.
  JoinEvent announce(const JoinEvent& event);
  /// What those with data do next, on a rank that has none.
  JoinEvent await_event();
  /// Under join() only.
  void announce_local_backward();
  /// Until then ranks without data take part in what modules announce. If it is owed.
  void announce_end();
  /// Whether the ends of backwards are announced, since collectives of others come between.
  bool announces_ends() const { return announces_ends_; }
  /// Whether a rank without data adds what it has kept to the average.
  bool counts_kept(const JoinEvent& backward) const {
    return backward.gradients_kept && divide_by_initial_;
  }

  /// A rank that had data to the end, the same on every rank; -1: all had. Collective.
  /// @param followed  this rank has taken part in what others announced.
  /// @param states    how many states this rank takes over from that rank; RankMismatch on every
  /// rank if they differ.
  int64_t last_with_data(bool followed, int64_t states);

 private:
  JoinEvent exchange(const JoinEvent* mine);

  ReducerContext& context_;
  const void* const owner_;
  bool divide_by_initial_ = true;  ///< averages are over all ranks, also those without data
  bool announces_ends_ = false;
};

}  // namespace apex::parallel::detail
