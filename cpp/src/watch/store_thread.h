// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The thread on which this process calls a store.

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "watch/job_thread.h"

namespace apex::parallel {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// One for each store, however many groups share it, with a connection of its own. A call of a
/// store blocks for as long as the process that keeps the store is stopped, so no other thread
/// makes one; and a call that blocks would keep the user's own from their connection. Thread safe.
class StoreThread {
 public:
  using Clock = std::chrono::steady_clock;

  /// The one for `store`, or for what it adds a prefix to.
  static std::shared_ptr<StoreThread> of(const StorePtr& store);

  /// See JobThread; what was posted before this ends is still run.
  void run(std::function<void()> job, Clock::time_point at = Clock::now()) {
    thread_.run(std::move(job), at);
  }
  /// On the thread: `store` over the connection of this process. A store that is no server is
  /// itself: a file is removed when as many stores on it have ended as there are ranks.
  /// @throws Error if the server cannot be reached; for a second more without trying.
  StorePtr connected(const StorePtr& store);
  /// On the thread: a call has failed. The next one makes another connection.
  void connection_lost();
  /// On the thread: so often was a connection lost.
  int64_t losses() const;

 private:
  StoreThread() = default;

  JobThread thread_;

  // Of the thread.
  StorePtr connection_;
  int64_t losses_ = 0;
  Clock::time_point not_before_;  ///< is a connection made again
};

/// The store of a group, by way of its thread. Does not keep the store: one that outlives its group
/// keeps its port. Thread safe.
class StoreClient : public std::enable_shared_from_this<StoreClient> {
 public:
  using Clock = std::chrono::steady_clock;
  using Body = std::function<void(c10d::Store& store)>;

  explicit StoreClient(const StorePtr& store) : given_(store), thread_(StoreThread::of(store)) {}

  /// Runs `body` on the thread, after what was posted before. The future is ready when that is
  /// done, and `body` is gone; or holds what it threw.
  std::shared_future<void> post(Body body);
  /// The same; returns whether it was done, without an error, before `until`.
  bool call(Body body, Clock::time_point until);
  /// On the thread: `body(view)`, where the view is the group's store over the thread's connection;
  /// again over another connection if it throws. @throws Error if the store is gone, or cannot be
  /// reached, and what `body` throws.
  void run(const Body& body);
  /// Whether somebody holds the store.
  bool is_there() const { return static_cast<bool>(given_.lock()); }

  StoreThread& thread() { return *thread_; }

 private:
  StorePtr view();

  const c10::weak_intrusive_ptr<c10d::Store> given_;
  const std::shared_ptr<StoreThread> thread_;
  StorePtr view_;       ///< of the thread, as the next
  int64_t losses_ = 0;  ///< before it was made
};

}  // namespace apex::parallel
