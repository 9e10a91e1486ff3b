// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// All wait times and intervals of the watcher.

#include <algorithm>
#include <chrono>

namespace apex::parallel::timing {

using std::chrono::milliseconds;

// --- a rank waits in a collective ---

/// A longer wait is unusual: from then on the rank checks other ranks' reports.
constexpr milliseconds kUsual{250};
/// Interval of checks of data in this process, by the thread that waits and by the watching one.
constexpr milliseconds kSlice{50};
constexpr milliseconds kTick{200};
/// Interval of store calls. Up to 10,000 ranks make 1,000 calls a second in total, and no rank
/// makes more than 5. A store answers some 30,000 a second.
constexpr milliseconds between_looks(int ranks) {
  return std::clamp(milliseconds(ranks), milliseconds(200), milliseconds(10000));
}
/// How long after a process of this host has exited a rank stops waiting, if the store does not
/// answer.
constexpr milliseconds kAlone{2000};
/// Data that a process sent before it exited arrives within this time.
constexpr milliseconds kOnTheWay{500};

// --- a rank is in no collective ---

/// Interval of store calls of a process, which its groups share. With one group, it is the time in
/// which a rank of another host answers. Ranks of one host wake each other.
constexpr milliseconds kIdle{10000};

// --- a stall: fractions of the stall time ---

/// Until a waiting rank posts its position and asks the others.
constexpr milliseconds until_asked(milliseconds stall) { return stall * 4 / 10; }
/// From then on until ranks of other hosts have answered.
constexpr milliseconds kAllAnswered = kIdle + milliseconds(1000);

// --- a collective has failed ---

/// Patience with the store and with other ranks: an eighth of the group's timeout, within these
/// limits.
constexpr milliseconds kLeastPatience{500};
constexpr milliseconds kMostPatience{5000};
/// Interval of polls while collecting reports; all ranks together make 10,000 calls a second.
constexpr milliseconds while_collecting(int ranks) {
  return std::max(milliseconds(20), milliseconds(ranks / 10));
}
/// Further waits after proof of a lost rank: for more proof, and for other ranks' proof if the
/// store has not answered yet.
constexpr milliseconds kAfterProof{100};
constexpr milliseconds kForOthers{300};
/// Interval of checks of the processes of this host meanwhile.
constexpr milliseconds kLook{20};
/// How long the process that hosts the store exists after it has reported a failure.
constexpr milliseconds kStays{1000};
/// Processes that end within this time after the first are not reported: they have failed with it.
constexpr milliseconds kFailsToo{10000};

}  // namespace apex::parallel::timing
