// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace apex::parallel::detail {

/// The lifecycle phase of a reducer. may_follow() defines the transitions.
enum class Phase {
  kIdle,      ///< between backwards
  kRunning,   ///< a synchronized backward is computing gradients
  kEnding,    ///< gradients are computed; it launches the remaining buckets and waits for all
  kFailed,    ///< a collective or a hook failed: the messages of the ranks no longer match
  kReleased,  ///< the process groups are gone
};

/// The allowed transitions.
constexpr bool may_follow(Phase from, Phase to) {
  switch (from) {
    case Phase::kIdle:
      return to == Phase::kRunning || to == Phase::kFailed || to == Phase::kReleased;
    case Phase::kRunning:
      return to == Phase::kEnding || to == Phase::kIdle || to == Phase::kFailed;
    case Phase::kEnding:
      return to == Phase::kIdle || to == Phase::kFailed;
    case Phase::kFailed:
      return to == Phase::kReleased;
    case Phase::kReleased:
      return false;
  }
  return false;
}

/// Whether a synchronized backward is in progress on this rank.
constexpr bool in_backward(Phase phase) {
  return phase == Phase::kRunning || phase == Phase::kEnding;
}

}  // namespace apex::parallel::detail
