// SPDX-License-Identifier: BSD-3-Clause
#include "watch/status_board.h"

#include <cstdlib>
#include <utility>

#include "watch/forced_unwind.h"

namespace apex::parallel {

std::shared_future<void> StatusBoard::post(int rank, const RankStatus& status) {
  return store_->post(
      [key = key_, author = std::to_string(rank), text = status.encode()](c10d::Store& store) {
        NoticeBoard(key(store)).post(store, author, text);
      });
}

StatusBoard::Following StatusBoard::follow(std::chrono::milliseconds interval) {
  auto follower = std::make_shared<const std::chrono::milliseconds>(interval);
  look_again(follower, Clock::now());
  return follower;
}

void StatusBoard::look_again(const Following& follower, Clock::time_point at) {
  store_->thread().run(
      [self = weak_from_this(), weak = std::weak_ptr<const std::chrono::milliseconds>(follower)] {
        const std::shared_ptr<StatusBoard> board = self.lock();
        const Following still = weak.lock();
        if (!board || !still) return;
        const auto began = Clock::now();
        board->look();
        board->look_again(still, began + *still);
      },
      at);
}

void StatusBoard::look() {
  const auto began = Clock::now();
  try {
    store_->run([&](c10d::Store& store) {
      const NoticeBoard notices(key_(store));
      const int64_t posts = notices.posts(store);
      RankStatuses statuses;
      if (posts != seen_) {
        for (const auto& [author, text] : notices.read(store))
          statuses[std::atoi(author.c_str())] = RankStatus::decode(text);
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      if (posts != std::exchange(seen_, posts)) statuses_ = std::move(statuses);
      answered_ = began;
    });
  } catch (APEX_FORCED_UNWIND) {
    throw;
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_ = Clock::now();
  }
  news_.notify_all();
}

bool StatusBoard::answered_since(Clock::time_point time) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return answered_ >= time;
}

bool StatusBoard::failed_since(Clock::time_point time) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failed_ >= time;
}

void StatusBoard::wait_for_news(Clock::time_point until) {
  std::unique_lock<std::mutex> lock(mutex_);
  news_.wait_until(lock, until);
}

}  // namespace apex::parallel
