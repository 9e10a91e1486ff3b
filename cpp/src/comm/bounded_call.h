// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Calls that may block without a deadline of their own: those of a store whose process is stopped.

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>

namespace apex::parallel {

/// Runs `body(stop)` on a thread of its own, which is left behind if it does not end in time. What
/// `body` uses, it must own. Not to be used by several threads at a time.
class BoundedCall {
 public:
  explicit BoundedCall(std::function<void(const std::atomic<bool>& stop)> body);
  ~BoundedCall();
  BoundedCall(const BoundedCall&) = delete;
  BoundedCall& operator=(const BoundedCall&) = delete;

  /// Blocks until `body` has ended, or `deadline`; returns whether it has ended.
  bool wait_until(std::chrono::steady_clock::time_point deadline);

  /// Tells `body` to stop, and does not wait for that. Done by the destructor, too.
  void leave();

  /// What `body` threw, if it has ended.
  std::exception_ptr error() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace apex::parallel
