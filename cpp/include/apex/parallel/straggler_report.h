// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <apex/export.h>

/// How long each rank takes for its own part of a step, and which rank the others wait for. Depends
/// on times only, not on the reducer; see Reducer::straggler_report().

namespace apex::parallel {

/// One rank's own part of a step: the time from the end of one synchronized backward until all
/// buckets of the next are launched, minus the time spent waiting in collectives of this library.
/// Unless stated otherwise, values are medians over the steps, in seconds.
struct RankTimes {
  double own_s = 0;
  double own_p95_s = 0;          ///< the 95th percentile
  double before_backward_s = 0;  ///< part of own_s: optimizer, data loading, forward and loss
  double backward_s = 0;         ///< part of own_s
  double ratio = 1;              ///< own_s divided by the median of the other ranks
  double last_share = 0;         ///< share of steps in which this rank took longest
  double gap_s = 0;              ///< longest time between two gradients of a backward
  int64_t gap_from = -1;         ///< the gradients around the most frequent such gap: indices into
  int64_t gap_to = -1;           ///< Reducer::parameters(); -1: the gap is before the first
  std::string gap_from_name;     ///< their names; empty for -1
  std::string gap_to_name;
};

struct StragglerReport {
  int64_t steps = 0;             ///< number of steps, the most recent ones, at most 256
  std::vector<RankTimes> ranks;  ///< by rank of the group
  /// The rank that delays the others, or -1. Over at least ten steps its own part takes 2% longer
  /// than their median, and it is last more often than by chance, by three standard deviations.
  int64_t straggler = -1;
};

/// A table with a row per rank, and a sentence about the straggler. Every line ends with a newline.
/// Thread safe; does not block.
APEX_API std::string to_string(const StragglerReport& report);

}  // namespace apex::parallel
