// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include <apex/parallel/reducer.h>

/// Scope guards that DistributedDataParallel::no_sync(), weight() and join() return.

namespace apex::parallel {

namespace detail {

/// State shared by the live guards of no_sync().
struct NoSyncGuards {
  Reducer& reducer;
  int count = 0;
  bool before = true;  ///< the setting before the first guard
};

}  // namespace detail

/// While this guard lives, backward does not communicate, and gradients accumulate. The next
/// synchronized backward includes what accumulated. Several guards may live at a time and end in
/// any order. The wrapper must outlive them. Every rank must do the same.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::shared_ptr<detail::NoSyncGuards> guards) : guards_(std::move(guards)) {
    if (guards_->count++ > 0) return;
    guards_->before = guards_->reducer.synchronizing();
    guards_->reducer.set_synchronizing(false);
  }
  ~NoSync() {
    if (--guards_->count == 0) guards_->reducer.set_synchronizing(guards_->before);
  }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  const std::shared_ptr<detail::NoSyncGuards> guards_;
};

/// While this guard lives, backwards are for samples of a given weight; see
/// Reducer::begin_weight(). Only one at a time. The wrapper must outlive it.
class [[nodiscard]] Weight {
 public:
  template <typename Number>
  Weight(Reducer& reducer, const Number& weight) : reducer_(reducer) {
    reducer_.begin_weight(weight);
  }
  ~Weight() { reducer_.end_weight(); }
  Weight(const Weight&) = delete;
  Weight& operator=(const Weight&) = delete;

 private:
  Reducer& reducer_;
};

// Note [A destructor that throws]
//
// Only Join's destructor throws. The end of its scope is a collective: this rank follows the other
// ranks and receives their parameters. If that fails, this rank's model differs from theirs, and a
// destructor that hid the error would let the program save this model or train on. So the
// destructor throws (noexcept(false)), except while another exception propagates, because that
// exception states the cause. Nothing is left to release at that point. A program that does not
// want a throwing destructor calls end() after its loop, which makes the destructor a no-op.

/// For ranks with different numbers of batches: construct it before the loop over batches, on every
/// rank. At its end, a rank that finishes early takes part in the others' backwards with zeros
/// until every rank has finished. It then receives the parameters and buffers of a rank that had
/// data to the end. Blocks meanwhile. If an exception leaves the loop, the guard ends without
/// waiting for other ranks. The wrapper must outlive the guard and must not be moved.
class [[nodiscard]] Join {
 public:
  /// `end` follows the other ranks and may throw. `leave` is called instead after an exception, and
  /// must not throw.
  Join(std::function<void()> end, std::function<void()> leave)
      : end_(std::move(end)), leave_(std::move(leave)), exceptions_(std::uncaught_exceptions()) {}

  /// Calls end(). While an exception propagates, leaves without waiting for other ranks.
  /// @throws CommunicationError, RankMismatch: errors while following the other ranks.
  ~Join() noexcept(false) {
    if (std::uncaught_exceptions() == exceptions_) {
      end();
    } else if (end_) {
      leave_();
    }
  }
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// Blocks until every rank has called it. Idempotent.
  void end() {
    if (const auto end = std::exchange(end_, nullptr)) end();
  }

 private:
  std::function<void()> end_;
  const std::function<void()> leave_;
  const int exceptions_;
};

}  // namespace apex::parallel
