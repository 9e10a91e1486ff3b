// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace apex::parallel::detail {

/// Where a reducer is in its life. See may_follow() for what comes after what.
enum class Phase {
  kIdle,      ///< between backwards
  kRunning,   ///< a synchronized backward is computing gradients
  kEnding,    ///< they are computed; the rest of the buckets is launched, and all are awaited
  kDeferred,  ///< backward has returned, its buckets are in flight
  kFailed,    ///< a collective or a hook failed: the messages of the ranks do not match any more
  kReleased,  ///< the process groups are gone
};

/// The transitions.
constexpr bool may_follow(Phase from, Phase to) {
  switch (from) {
    case Phase::kIdle:
      return to == Phase::kRunning || to == Phase::kFailed || to == Phase::kReleased;
    case Phase::kRunning:
      return to == Phase::kEnding || to == Phase::kIdle || to == Phase::kFailed;
    case Phase::kEnding:
      return to == Phase::kIdle || to == Phase::kDeferred || to == Phase::kFailed;
    case Phase::kDeferred:
      return to == Phase::kEnding || to == Phase::kIdle || to == Phase::kFailed;
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
