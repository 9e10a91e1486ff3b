// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The thread on which this process calls a store.

#include <chrono>
#include <functional>
#include <future>
#include <memory>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace apex::parallel {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Note [Stores that are not kept]
//
// destroy_process_group() ends the job's store, which frees its port, or removes its file. A weak
// reference would prevent that: c10d's stores are destroyed only with the last weak reference. (A
// process group releases what it holds with the last strong one.) So nothing here refers to a
// group's store between calls. A TCPStore is cloned, which connects to its server. Any other store
// is looked up in its group: a file store removes its file once as many stores on it were destroyed
// as there are ranks.

/// One thread per store, shared by all groups on it. A store call blocks while the process that
/// hosts the store is stopped, so no other thread calls the store. The thread is detached: if it is
/// blocked in a job, it is left behind. Thread safe.
class StoreThread {
 public:
  using Clock = std::chrono::steady_clock;

  /// The thread for `store`, or for the store inside a prefix store.
  static std::shared_ptr<StoreThread> of(const StorePtr& store);
  ~StoreThread();  ///< due jobs still run
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  /// Schedules `job`. Due jobs run in the order of their times.
  void run(std::function<void()> job, Clock::time_point at = Clock::now());

 private:
  struct State;
  StoreThread();

  const std::shared_ptr<State> state_;
};

/// Access to a group's store through its thread; see Note [Stores that are not kept]. Thread safe.
class StoreClient : public std::enable_shared_from_this<StoreClient> {
 public:
  using Clock = std::chrono::steady_clock;
  using Body = std::function<void(c10d::Store& store)>;

  /// The store of `group`, which has one.
  explicit StoreClient(const c10d::ProcessGroup& group);

  /// Runs `body` on the thread, after earlier posts. The future is ready when `body` has run and is
  /// destroyed; it holds the exception of `body`.
  std::shared_future<void> post(Body body);
  /// The same; returns whether `body` has run without an error before `until`.
  bool call(Body body, Clock::time_point until);
  /// On the thread: calls `body` with the group's store. After an exception a TCPStore is lost.
  /// @throws Error if the store is gone or lost; exceptions of `body`.
  void run(const Body& body);
  /// Whether the group still exists.
  bool is_there() const { return !group_.expired(); }

  StoreThread& thread() { return *thread_; }

 private:
  StorePtr view();

  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  const std::shared_ptr<StoreThread> thread_;
  StorePtr clone_;  ///< of a TCPStore; used on the thread, like lost_
  bool lost_ = false;
};

}  // namespace apex::parallel
