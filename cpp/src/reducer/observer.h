// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Whoever wants to know when things happen in a backward.

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include "reducer/reduction.h"

namespace apex::parallel::detail {

/// Called on the thread on which it happens, between one began() and the next completed() or
/// dropped(). gradient_ready() may come from one thread while another is in launched() or
/// in_flight(). Must not throw.
class BackwardObserver {
 public:
  virtual ~BackwardObserver() = default;
  /// @param device  of all parameters; nullopt: they are on several.
  virtual void began(std::optional<c10::Device> /*device*/, size_t /*parameters*/) {}
  virtual void gradient_ready(size_t /*parameter*/) {}
  /// A message is packed, and is handed over now.
  virtual void launched(size_t /*bucket*/, const BucketMessage& /*message*/) {}
  /// It was, by `reduction`; called again for its next phase.
  virtual void in_flight(size_t /*bucket*/, const Reduction& /*reduction*/) {}
  /// Somebody waits for it from now on; and has it.
  virtual void awaiting(size_t /*bucket*/) {}
  virtual void arrived(size_t /*bucket*/) {}
  /// backward() returns, its buckets are in flight.
  virtual void deferred() {}
  /// All gradients are averages.
  virtual void completed() {}
  /// The backward failed.
  virtual void dropped() {}
};

/// Those who look at a reducer. The reducer does not know who they are.
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
