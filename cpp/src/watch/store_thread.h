// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The thread on which this process calls a store.

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "watch/job_thread.h"

namespace apex::parallel {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Note [Stores that are not kept]
//
// destroy_process_group() ends the job's store, which frees its port, or removes its file. A weak
// reference would prevent that: c10d's stores are destroyed only with the last weak reference. (A
// process group releases what it holds with the last strong one.) So nothing here refers to a store
// between calls. For a store with a server, address and port are enough for a connection. Any other
// store is looked up in its group.

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
  /// Whether the store has a server, to which the thread connects.
  bool has_server() const { return server_.has_value(); }
  /// On the thread: this process's own connection to the store's server.
  /// @throws Error if the server cannot be reached; then it is not tried again.
  StorePtr connection();
  /// On the thread: a call has failed. The next call makes a new connection.
  void connection_lost();
  /// On the thread: the number of lost connections.
  int64_t losses() const;

 private:
  struct Server {
    std::string host;
    c10d::TCPStoreOptions options;
  };
  explicit StoreThread(const c10d::TCPStore* server);

  std::optional<Server> server_;
  JobThread thread_;

  // Used on the thread.
  StorePtr connection_;
  int64_t losses_ = 0;
  bool gone_ = false;  ///< the server could not be reached
};

/// Access to a group's store through its thread; see Note [Stores that are not kept]. A store
/// without a server is used itself: a file store removes its file once as many stores on it were
/// destroyed as there are ranks. Thread safe.
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
  /// On the thread: calls `body(view)` with the group's store over the thread's connection. If that
  /// throws, calls it once more over a new connection.
  /// @throws Error if the store is gone or cannot be reached; exceptions of `body`.
  void run(const Body& body);
  /// Whether the group still exists.
  bool is_there() const { return !group_.expired(); }

  StoreThread& thread() { return *thread_; }

 private:
  StorePtr view();

  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  const std::shared_ptr<StoreThread> thread_;
  const std::optional<std::string> prefix_;  ///< of the group's store
  StorePtr view_;                            ///< used on the thread, like losses_
  int64_t losses_ = 0;                       ///< losses() when view_ was made
};

}  // namespace apex::parallel
