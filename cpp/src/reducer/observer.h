// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Observers of the events in a backward.

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include "reducer/reduction.h"

namespace apex::parallel::detail {

/// The callbacks run on the thread of the event, between began() and the next completed() or
/// dropped(). gradient_ready() may run on one thread while another is in launched() or in_flight().
/// Must not throw.
class BackwardObserver {
 public:
  virtual ~BackwardObserver() = default;
  /// @param device  of all parameters; nullopt if they are on several devices.
  virtual void began(std::optional<c10::Device> /*device*/, size_t /*parameters*/) {}
  virtual void gradient_ready(size_t /*parameter*/) {}
  /// A message is packed, and its reduction starts now.
  virtual void launched(size_t /*bucket*/, const BucketMessage& /*message*/) {}
  /// `reduction` has started.
  virtual void in_flight(size_t /*bucket*/, const Reduction& /*reduction*/) {}
  /// The wait for a bucket begins (awaiting) and ends (arrived).
  virtual void awaiting(size_t /*bucket*/) {}
  virtual void arrived(size_t /*bucket*/) {}
  /// backward() returns with buckets in flight.
  virtual void deferred() {}
  /// All gradients are averages.
  virtual void completed() {}
  /// The backward failed.
  virtual void dropped() {}
};

class Observers {
 public:
  void add(BackwardObserver* observer) { all_.push_back(observer); }
  void remove(BackwardObserver* observer);

  template <typename... Parameters, typename... Arguments>
  void tell(void (BackwardObserver::*what)(Parameters...), const Arguments&... arguments) const {
    for (BackwardObserver* observer : all_) (observer->*what)(arguments...);
  }

 private:
  std::vector<BackwardObserver*> all_;
};

inline void Observers::remove(BackwardObserver* observer) {
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i] == observer) all_.erase(all_.begin() + static_cast<std::ptrdiff_t>(i--));
  }
}

}  // namespace apex::parallel::detail
