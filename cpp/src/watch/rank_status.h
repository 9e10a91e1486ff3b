// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A rank's report about a group after a failure, and the decisions that follow from all ranks'
/// reports. Pure.

#include <map>
#include <string>
#include <vector>

namespace apex::parallel {

/// What happened to the process of each rank, such as "has ended (process 17)".
using Proof = std::map<int, std::string>;

/// One rank's report: a collective of the group, or of a group made from it, has failed on this
/// rank.
struct RankStatus {
  std::string what;
  Proof proof;  ///< about other ranks

  std::string encode() const;
  static RankStatus decode(const std::string& text);
};

/// Reports by rank.
using RankStatuses = std::map<int, RankStatus>;

/// The findings of a waiting rank.
struct Verdict {
  enum Kind {
    kOk,      ///< other ranks may just be late
    kFailed,  ///< another rank reports that a collective of the group has failed
    kApart,   ///< the ranks are in different collectives; text: which
    kLost,    ///< a process of the group has exited, and the store is lost as well
  };
  Kind kind = kOk;
  std::string text;
};

/// "rank 3", "ranks 1, 2"; a long list is shortened.
std::string list_of(const std::vector<int>& ranks);

/// The known facts about a failure of a group.
struct Findings {
  std::map<int, std::string> reports;  ///< by rank, except this one: the collective that failed
                                       ///< there
  Proof proof;                         ///< about ranks without a report
};

Findings find(const RankStatuses& statuses, int rank);

}  // namespace apex::parallel
