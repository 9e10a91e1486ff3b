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
// is synchronized, whether another forward comes first, or whether they have also ended. So under
// join() the ranks with data announce each step in a small all-gather. A rank without data
// contributes zeros, and reads from the result which collectives to join. Everything happens in the
// order of the announcements, so the order is the same on every rank.

/// A reducer's part of join(). Collective functions block the host and take the right to change the
/// reducer (see Note [Who may touch a reducer]). For the other functions the caller must have it.
class UnevenInputs {
 public:
  UnevenInputs(ReducerContext& context, const void* owner) : context_(context), owner_(owner) {}

  /// @param announce  called by collectives of other modules, which must be announced to ranks
  /// without data.
  void begin(bool divide_by_initial_world_size, std::function<void(int64_t)> announce);
  /// This rank has run out of data, and stops announcing. Thread safe.
  void follow();
  void end();

  /// Announces the next step of this rank to ranks without data. Collective.
  /// @throws RankMismatch on every rank if the ranks with data make different announcements.
  JoinEvent announce(const JoinEvent& event);
  /// Waits, on a rank without data, for the next step of the ranks with data. Collective.
  JoinEvent await_event();
  /// Announces a backward that is not synchronized. Does nothing outside of join().
  void announce_local_backward();
  /// Announces the end of a backward, if `owes_end` is set. Until then ranks without data take part
  /// in the collectives that modules announce.
  void announce_end();
  /// Whether the ends of backwards are announced, because modules have collectives in backward.
  bool announces_ends() const { return announces_ends_; }
  /// Whether a rank without data adds its kept gradients to the average.
  bool counts_kept(const JoinEvent& backward) const {
    return backward.gradients_kept && divide_by_initial_;
  }

  /// A rank that had data until the end, the same on every rank; -1 if all had. Collective.
  /// @param followed  whether this rank has followed the announcements of others.
  int64_t last_with_data(bool followed);

 private:
  JoinEvent exchange(const JoinEvent* mine);

  ReducerContext& context_;
  const void* const owner_;
  bool divide_by_initial_ = true;  ///< averages are over all ranks, including ranks without data
  bool announces_ends_ = false;
};

}  // namespace apex::parallel::detail
