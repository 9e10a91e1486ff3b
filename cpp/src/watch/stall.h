// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Stall detection: waiting ranks report where they are, and one of them prints which rank they
/// wait for.

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>

#include "watch/watched_group.h"

namespace apex::parallel {

// Note [Stalls]
//
// A rank that has waited for a while posts that on its group's board in the store. Every process
// polls for new posts, and answers with its own position and activity. This runs on the store's
// thread, since the main thread may be busy. When the stall time has passed, one of the waiting
// ranks reads the board and prints the verdict. If N ranks wait for one, each makes a few store
// calls, and one of them reads N posts.
//
// A rank posts after 0.4 of the stall time, and the others poll every 0.3 of it, so they answer in
// time. A rank that has answered that it is not waiting, and then starts to wait, posts that
// immediately. The procedure repeats after 2, 4, ... times the stall time. The last printed verdict
// is in the store: a rank prints only if no other rank has printed since this rank asked, and if
// the cause has changed. A rank adds another rank's verdict to its own error.
//
// Over NCCL the GPU waits while the host continues, possibly several calls ahead. So the polls also
// check whether the last launched collective has completed. If it does not for the stall time, the
// rank asks the others. A busy GPU looks the same as a waiting one, so a rank counts as late only
// if its host has not made the call yet.

/// The stall time: 10 s, or the environment variable APEX_STALL_SECONDS; 0 turns verdicts off.
std::chrono::milliseconds stall_time();
/// For tests.
void set_stall_time(std::chrono::milliseconds time);

/// From now on this rank answers stall posts in `group`.
void answer_stalls(const WatchedGroupPtr& group);

/// Records that this rank has launched `work`, the collective `what` of `group`, which the host
/// does not wait for. Not while a graph is captured.
void remember_launched(const c10d::ProcessGroup& group, const std::string& what,
                       const c10::intrusive_ptr<c10d::Work>& work) noexcept;

/// The last printed verdict about this rank's last call; empty if unknown. Waits briefly for the
/// store.
std::string latest_verdict(const WatchedGroupPtr& group);

/// Stops answering at process exit. A store may be written in Python, which must not be called
/// while the interpreter exits. Waits at most one second for a post in progress.
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

  void poll();

 private:
  struct Waiting;
  /// One round of questions, answers and verdict. Used on the store's thread.
  struct Round {
    int64_t asked = 0;
    Clock::time_point asked_at;
    std::string said;  ///< the last printed verdict at that time
  };
  explicit StallWatch(std::shared_ptr<Waiting> waiting);
  void correct();
  void post(bool waits);

  const std::shared_ptr<Waiting> waiting_;  ///< shared with the store's thread
  const std::chrono::milliseconds limit_;
  std::chrono::milliseconds due_;  ///< time from the start of the wait to the next verdict
  bool posted_ = false;            ///< this rank has posted its position
  std::shared_ptr<Round> round_;
  std::shared_future<void> verdict_;
};

}  // namespace apex::parallel
