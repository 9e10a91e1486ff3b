// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Stall detection: waiting ranks report where they are, and one of them prints which rank they
/// wait for.

#include <chrono>
#include <memory>
#include <string>

#include "watch/watched_group.h"

namespace apex::parallel {

// Note [Stalls]
//
// A rank that has waited for 0.4 of the stall time reports that in the store, and asks. The other
// ranks of its host are woken; those of other hosts look for news from time to time. Each answers
// with its own position and activity, on the store's thread, since the main thread may be busy. A
// rank that has answered that it is in no collective, and then starts to wait, reports that. When
// the stall time has passed, the first rank that waits in this call reads all reports, prints which
// rank is late, and leaves the text in the store, for the errors of the others. Ranks that wait in
// different calls for the same rank may print one report each. The procedure repeats after 4, 16,
// ... times the stall time. The reports also show whether ranks are in different collectives: see
// Note [Ranks in different collectives].
//
// Over NCCL the GPU waits while the host continues, possibly several calls ahead. So a timer checks
// whether the last launched collective has completed. If it does not for the stall time, the rank
// asks the others. A busy GPU looks the same as a waiting one, so a rank counts as late only if its
// host has not made the call yet.

/// The stall time: 10 s, or the environment variable APEX_STALL_SECONDS; 0 turns reports off.
std::chrono::milliseconds stall_time();
/// For tests.
void set_stall_time(std::chrono::milliseconds time);

/// Where this rank is: the collective in which it waits, or else its latest call.
RankRecord position(Board& board);

/// Records that this rank has launched `work`, the collective `what` of `group`, which the host
/// does not wait for. Not while a graph is captured.
void remember_launched(const c10d::ProcessGroup& group, const std::string& what,
                       const c10::intrusive_ptr<c10d::Work>& work) noexcept;

/// At process exit: stops answering, since a state reader may call Python, which must not be called
/// while the interpreter exits. Waits at most one second for an answer in progress, and for ranks
/// that read this rank's failure.
void end_answers();

/// Watches one wait of this rank or of its GPU. Not thread safe; never blocks.
class StallWatch {
 public:
  using Clock = std::chrono::steady_clock;

  /// A wait in the last call of `group`.
  explicit StallWatch(const WatchedGroupPtr& group);
  /// A wait of the GPU in `launched` or before it.
  StallWatch(const WatchedGroupPtr& group, const Launched& launched);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  /// Returns in which collectives the ranks are, if these are different ones; otherwise "".
  std::string poll();

 private:
  struct Waiting;
  explicit StallWatch(std::shared_ptr<Waiting> waiting);

  const std::shared_ptr<Waiting> waiting_;  ///< shared with the store's thread
  const std::chrono::milliseconds limit_;
  std::chrono::milliseconds due_;  ///< time from the start of the wait to the next report
  bool asked_ = false, compared_ = false, read_ = false;  ///< done before it is due
};

}  // namespace apex::parallel
