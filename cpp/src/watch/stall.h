// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Ranks that wait for long: all report where they are, and one prints who holds them up.

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>

#include "watch/watched_group.h"

namespace apex::parallel {

// Note [Stalls]
//
// A rank that has waited for a while posts so on a board of its group in the store. Every process
// asks now and then whether there are new posts, and if so, it posts where it is itself and what it
// is doing. That runs on the store's thread: the main thread may be anywhere. When the time of a
// stall is over, one of the ranks that wait reads the board and prints the verdict. Where N ranks
// wait for one, each makes some calls of the store, and one of them reads N posts.
//
// A rank posts after four tenths of the time that it waits; the others ask every three tenths, so
// that they have answered by then. Who has answered that it does not wait, and then does, posts
// that at once. After twice, four times, ... the time the same is done again. What was printed last
// is in the store: a rank prints if no rank has done so since it asked, and if something else holds
// everybody up than before; and the verdict of another rank is part of its own error.
//
// Over NCCL the GPU waits while the host goes on, which may be several calls ahead, and a GPU that
// is busy looks the same. So a rank is late there if its host has not made the call yet. See also
// Note [Collectives that the host does not wait for].

/// 10 s; the environment variable APEX_STALL_SECONDS sets another time, and 0 is never.
std::chrono::milliseconds stall_time();
/// For tests.
void set_stall_time(std::chrono::milliseconds time);

/// From now on this rank posts where it is, if others wait in `group` for long.
void answer_stalls(const WatchedGroupPtr& group);

/// What ranks have printed last about this rank's last call; empty if that is not known. Waits for
/// the store, for a moment.
std::string latest_verdict(const WatchedGroupPtr& group);

/// The process ends: nothing is posted any more. A store may be written in Python, which must not
/// be called while the interpreter ends. Waits for a post that is under way, a second at most.
void end_answers();

/// A wait of this rank, or of its GPU. Not thread safe; nothing blocks.
class StallWatch {
 public:
  using Clock = std::chrono::steady_clock;

  /// In its last call of `group`.
  explicit StallWatch(const WatchedGroupPtr& group);
  /// Of the GPU, in that call.
  StallWatch(const WatchedGroupPtr& group, int64_t call, const std::string& what);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  void poll();

 private:
  struct Waiting;
  /// One question to the others, and what follows. Of the store's thread.
  struct Round {
    int64_t asked = 0;
    Clock::time_point asked_at;
    std::string said;  ///< by ranks, until then
  };
  explicit StallWatch(std::shared_ptr<Waiting> waiting);
  void correct();
  void post(bool waits);

  const std::shared_ptr<Waiting> waiting_;  ///< shared with the store's thread
  const std::chrono::milliseconds limit_;
  std::chrono::milliseconds due_;  ///< the next verdict, since the wait began
  bool posted_ = false;            ///< where this rank is
  std::shared_ptr<Round> round_;
  std::shared_future<void> verdict_;
};

}  // namespace apex::parallel
