// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Hears, during a wait, what other ranks have reported.

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/hook_failure.h"

namespace apex::parallel {

/// Listens, while it lives, for other ranks that report a failure of `group`, and looks whether
/// they are in another collective.
class FailureListener {
 public:
  explicit FailureListener(const c10d::ProcessGroup& group,
                           Waiting waiting = Waiting::kInCollective);
  ~FailureListener();
  FailureListener(const FailureListener&) = delete;
  FailureListener& operator=(const FailureListener&) = delete;
  bool heard() const;
  /// Whether a process of the group on this host has ended, and the store is lost since; for who
  /// waits.
  bool is_left_alone();
  /// Which ranks are where; empty as long as nothing else is known than that they are late.
  std::string apart() const;
  /// What failed_hook() says.
  std::string hook() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace apex::parallel
