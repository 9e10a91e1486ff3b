// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A local copy of what all ranks of a group have reported.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>

#include "watch/notice_board.h"
#include "watch/rank_status.h"
#include "watch/store_thread.h"

namespace apex::parallel {

/// A copy in memory of a NoticeBoard of RankStatus. It is updated while a Following exists. Only
/// the store's thread calls the store, so readers never block on it. Thread safe.
class StatusBoard : public std::enable_shared_from_this<StatusBoard> {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param key  returns the key in the store, the same on all ranks; called on the store's thread.
  StatusBoard(std::shared_ptr<StoreClient> store, std::function<std::string(c10d::Store&)> key)
      : store_(std::move(store)), key_(std::move(key)) {}

  /// Replaces the status of `rank`. For the future, see StoreClient::post().
  std::shared_future<void> post(int rank, const RankStatus& status);

  /// While a Following lives, the board polls the store now and every `interval`. A poll takes one
  /// call unless there are new posts.
  using Following = std::shared_ptr<const std::chrono::milliseconds>;
  Following follow(std::chrono::milliseconds interval);

  /// Calls `look(statuses)` under a lock.
  template <typename Look>
  auto read(Look&& look) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return look(const_cast<const RankStatuses&>(statuses_));
  }
  /// Whether the store has answered a poll that began after `time`.
  bool answered_since(Clock::time_point time);
  /// Whether the store has raised an error since `time`.
  bool failed_since(Clock::time_point time);
  /// Blocks until there may be new posts, or `until`.
  void wait_for_news(Clock::time_point until);

 private:
  void look();  ///< on the store's thread, like all calls of the store
  void look_again(const Following& follower, Clock::time_point at);

  const std::shared_ptr<StoreClient> store_;
  const std::function<std::string(c10d::Store&)> key_;

  int64_t seen_ = 0;  ///< number of posts seen; used on the store's thread

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable news_;
  RankStatuses statuses_;
  Clock::time_point answered_;  ///< start of the last poll that the store answered
  Clock::time_point failed_;    ///< when the store last raised an error
};

}  // namespace apex::parallel
