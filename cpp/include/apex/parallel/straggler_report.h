// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <apex/export.h>

/// How long each rank takes for its own part of a step, and which one the others wait for. A leaf:
/// it knows times, not the reducer; see Reducer::straggler_report().

namespace apex::parallel {

/// One rank's own part of the steps: from the end of one synchronized backward until all buckets of
/// the next are on their way, without the time in which it waited in collectives of this library.
/// Medians over the steps, in seconds, but for what says otherwise.
struct RankTimes {
  double own_s = 0;
  double own_p95_s = 0;          ///< the 95th percentile
  double before_backward_s = 0;  ///< of own_s: the optimizer, the data, forward and the loss
  double backward_s = 0;         ///< of own_s
  double ratio = 1;              ///< own_s by the median of the other ranks'
  double last_share = 0;         ///< the share of steps in which no rank took longer
  double gap_s = 0;              ///< the longest time between two gradients of a backward
  int64_t gap_from = -1;         ///< parameters, in the order of Reducer::parameters(), between
  int64_t gap_to = -1;           ///< whose gradients that most often is; -1: before the first
  std::string gap_from_name;     ///< their names; empty for -1
  std::string gap_to_name;
};

struct StragglerReport {
  int64_t steps = 0;             ///< the last ones, at most 256
  std::vector<RankTimes> ranks;  ///< by rank of the group
  /// The rank that holds up the others, or -1: over ten steps or more it takes 2 % longer than
  /// their median, and is the last one three standard deviations more often than by chance.
  int64_t straggler = -1;
};

/// A table with a row per rank, and a sentence about the straggler. Several lines, each ended.
/// Thread safe; does not block.
APEX_API std::string to_string(const StragglerReport& report);

}  // namespace apex::parallel
