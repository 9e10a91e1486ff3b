// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// How long is waited for what, in one place.

#include <algorithm>
#include <chrono>

namespace apex::parallel::timing {

using std::chrono::milliseconds;

// --- a rank waits in a collective ---

/// A wait that takes longer is unusual: from then on the rank looks at what others report.
constexpr milliseconds kUsual{250};
/// Between two looks at what is known in this process.
constexpr milliseconds kSlice{50};
/// Between two calls of the store, by the number of ranks: all together they make 1,000 a second,
/// up to 10,000 ranks, and 5 a second each at most. A store answers some 30,000.
constexpr milliseconds between_looks(int ranks) {
  return std::clamp(milliseconds(ranks), milliseconds(200), milliseconds(10000));
}
/// Between two looks at the processes of this host.
constexpr milliseconds kNeighbours{200};
/// Until a rank looks whether the others wait in the same collective; doubled each time.
constexpr milliseconds kLate{2000};
/// From when a process of this host has ended, while the store does not answer either, or a GPU has
/// not finished what it was to do with it.
constexpr milliseconds kAlone{2000};
/// Until it is looked whether a GPU has finished what it was given: then a rank looks at what
/// others report, and at the processes.
constexpr milliseconds kUnfinished{1000};
/// What a process that has ended sent before arrives within this.
constexpr milliseconds kOnTheWay{500};

/// Until a connection to the store that was lost is made again, and to see whether it can be.
constexpr milliseconds kReconnect{1000};
constexpr milliseconds kProbe{200};

// --- a stall: parts of the time after which it is said who holds everybody up ---

/// Until a rank that waits says where it is, and asks the others.
constexpr milliseconds until_asked(milliseconds stall) { return stall * 4 / 10; }
/// Between two looks of the others whether they are asked: at least one comes before the verdict.
constexpr milliseconds between_answers(milliseconds stall) { return stall * 3 / 10; }
/// Who has not answered after that does not.
constexpr milliseconds until_answered(milliseconds stall) { return stall * 45 / 100; }
/// Until the verdict is printed without the store, which has not answered.
constexpr milliseconds until_alone(milliseconds stall) { return stall * 13 / 10; }

// --- a collective has failed ---

/// How long the store and other ranks are waited for: an eighth of the group's timeout, within
/// these.
constexpr milliseconds kLeastPatience{500};
constexpr milliseconds kMostPatience{5000};
/// Between two looks of a rank that collects reports; all ranks together make 10,000 calls a
/// second.
constexpr milliseconds while_collecting(int ranks) {
  return std::max(milliseconds(20), milliseconds(ranks / 10));
}
/// Once there is proof of who is lost: for more of it; and for that of others, where the store has
/// not answered yet.
constexpr milliseconds kAfterProof{100};
constexpr milliseconds kForOthers{300};
/// Between two looks at what is known in this process, meanwhile.
constexpr milliseconds kLook{20};
/// The rank that keeps the store waits so long for those that still read it.
constexpr milliseconds kUntilAllHaveRead{2000};
/// What was found out is not asked for again.
constexpr milliseconds kVerdictHolds{10000};

}  // namespace apex::parallel::timing
