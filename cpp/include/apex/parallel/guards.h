// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include <apex/parallel/reducer.h>

/// What DistributedDataParallel::no_sync(), weight() and join() return: settings that end with a
/// scope.

namespace apex::parallel {

namespace detail {

/// The living guards of no_sync().
struct NoSyncGuards {
  Reducer& reducer;
  int count = 0;
  bool before = true;  ///< the first of them
};

}  // namespace detail

/// While it lives, backward does not communicate and gradients accumulate; what accumulated is part
/// of the next synchronized backward. Several may live at a time, and end in any order; the wrapper
/// has to outlive them. Every rank has to do the same.
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

/// While it lives, backwards are of samples with a weight: see Reducer::begin_weight(). One at a
/// time; the wrapper has to outlive it.
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
// Join's is the only one. The end of its scope is a collective: this rank follows the others, and
// takes their parameters. If that fails, the model of this rank is not that of the others, and a
// destructor that kept this to itself would let the program save it, or train on. So it throws
// (noexcept(false)), but not while another exception is on its way, which says more; and nothing is
// left to be released then. A program that wants no such destructor calls end() behind its loop:
// then the destructor does nothing.

/// For ranks with different numbers of batches: lives around the loop over them, on every rank. At
/// its end a rank that is through first takes part in the others' backwards with zeros, until every
/// rank is through; then it has the parameters and buffers of one that went to the end. Blocks
/// meanwhile. An exception that leaves the loop ends it without waiting for anybody. The wrapper
/// has to outlive it, and stay where it is.
class [[nodiscard]] Join {
 public:
  /// `end` follows the other ranks, and may throw; `leave`, instead of it, does not.
  Join(std::function<void()> end, std::function<void()> leave)
      : end_(std::move(end)), leave_(std::move(leave)), exceptions_(std::uncaught_exceptions()) {}

  /// end(), or, while an exception is on its way, without waiting for anybody.
  /// @throws CommunicationError, RankMismatch: what went wrong while it followed the others.
  ~Join() noexcept(false) {
    if (std::uncaught_exceptions() == exceptions_) {
      end();
    } else if (end_) {
      leave_();
    }
  }
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// Blocks until every rank has called it. Does nothing the second time.
  void end() {
    if (const auto end = std::exchange(end_, nullptr)) end();
  }

 private:
  std::function<void()> end_;
  const std::function<void()> leave_;
  const int exceptions_;
};

}  // namespace apex::parallel
