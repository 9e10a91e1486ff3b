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

/// One thread per store, shared by all groups on it, with its own connection. A store call blocks
/// while the process that hosts the store is stopped, so no other thread calls the store. On the
/// user's connection, a blocked call would also block the user's calls. Thread safe.
class StoreThread {
 public:
  using Clock = std::chrono::steady_clock;

  /// The thread for `store`, or for the store inside a prefix store.
  static std::shared_ptr<StoreThread> of(const StorePtr& store);

  /// See JobThread. Jobs that were posted before destruction still run.
  void run(std::function<void()> job, Clock::time_point at = Clock::now()) {
    thread_.run(std::move(job), at);
  }
  /// On the thread: `store` over this process's own connection. A store without a server is
  /// returned as is: a file store deletes its file when the number of destroyed store objects
  /// reaches the number of ranks.
  /// @throws Error if the server cannot be reached; during the next second immediately, without a
  ///         new attempt.
  StorePtr connected(const StorePtr& store);
  /// On the thread: a call has failed. The next call makes a new connection.
  void connection_lost();
  /// On the thread: the number of lost connections.
  int64_t losses() const;

 private:
  StoreThread() = default;

  JobThread thread_;

  // Used on the thread.
  StorePtr connection_;
  int64_t losses_ = 0;
  Clock::time_point not_before_;  ///< earliest time of the next connection attempt
};

/// Access to a group's store through its thread. Does not keep the store alive, because a store
/// that outlives its group keeps its port. Thread safe.
class StoreClient : public std::enable_shared_from_this<StoreClient> {
 public:
  using Clock = std::chrono::steady_clock;
  using Body = std::function<void(c10d::Store& store)>;

  explicit StoreClient(const StorePtr& store) : given_(store), thread_(StoreThread::of(store)) {}

  /// Runs `body` on the thread, after earlier posts. The future is ready when `body` has run and is
  /// destroyed; it holds the exception of `body`.
  std::shared_future<void> post(Body body);
  /// The same; returns whether `body` has run without an error before `until`.
  bool call(Body body, Clock::time_point until);
  /// On the thread: calls `body(view)` with the group's store over the thread's connection. If that
  /// throws, calls it once more over a new connection.
  /// @throws Error if the store is gone or cannot be reached; exceptions of `body`.
  void run(const Body& body);
  bool is_there() const { return static_cast<bool>(given_.lock()); }

  StoreThread& thread() { return *thread_; }

 private:
  StorePtr view();

  const c10::weak_intrusive_ptr<c10d::Store> given_;
  const std::shared_ptr<StoreThread> thread_;
  StorePtr view_;       ///< used on the thread, like losses_
  int64_t losses_ = 0;  ///< losses() when view_ was made
};

}  // namespace apex::parallel
