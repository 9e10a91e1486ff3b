// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What all ranks of a group have reported, as this process knows it.

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

/// A copy in memory of a NoticeBoard of RankStatus, kept up to date while somebody follows it. So
/// nobody but the store's thread calls the store, and who looks is not held up by it. Thread safe.
class StatusBoard : public std::enable_shared_from_this<StatusBoard> {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param key  of the store, the same on all ranks; asked for on the store's thread.
  StatusBoard(std::shared_ptr<StoreClient> store, std::function<std::string(c10d::Store&)> key)
      : store_(std::move(store)), key_(std::move(key)) {}

  /// Replaces the status of that rank. The future: see StoreClient::post().
  std::shared_future<void> post(int rank, const std::string& group, const RankStatus& status);

  /// While it lives the board asks the store now, and every `interval`, with one call unless there
  /// is news.
  using Following = std::shared_ptr<const std::chrono::milliseconds>;
  Following follow(std::chrono::milliseconds interval);

  /// `look(statuses)` under a lock.
  template <typename Look>
  auto read(Look&& look) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return look(const_cast<const RankStatuses&>(statuses_));
  }
  /// When the store last answered a look that began after `time`.
  bool answered_since(Clock::time_point time);
  /// Whether the store has raised an error since.
  bool failed_since(Clock::time_point time);
  /// Blocks until there may be news, or `until`.
  void wait_for_news(Clock::time_point until);

 private:
  void look();  ///< on the thread, as the rest of the store's calls
  void look_again(const Following& follower, Clock::time_point at);

  const std::shared_ptr<StoreClient> store_;
  const std::function<std::string(c10d::Store&)> key_;

  int64_t seen_ = 0;  ///< posts; the thread's

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable news_;
  RankStatuses statuses_;
  Clock::time_point answered_{};  ///< when the last one began that the store has answered
  Clock::time_point failed_{};    ///< when the store has last raised an error
};

}  // namespace apex::parallel
