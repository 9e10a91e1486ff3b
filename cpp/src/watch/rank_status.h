// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A rank's report about a group after a problem, and the decisions that follow from all ranks'
/// reports. Pure.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace apex::parallel {

/// What happened to the process of each rank, such as "has ended (process 17)".
using Proof = std::map<int, std::string>;

/// One rank's report about one group.
struct RankStatus {
  /// A collective of the group has failed on this rank.
  struct Failure {
    std::string what;
    Proof proof;  ///< about other ranks
    /// Not empty: the rank threw instead of making these calls, and continues. A slow rank may
    /// still make an earlier call.
    std::vector<int64_t> refused;
    bool over = false;  ///< the rank has continued since, in the parent group
  };
  std::optional<Failure> failure;

  std::string encode() const;
  static RankStatus decode(const std::string& text);
};

/// Reports by rank and by name of the group concerned. A group and its parent, which has the same
/// ranks, share them.
using RankStatuses = std::map<std::pair<int, std::string>, RankStatus>;
using ReportKeys = std::set<RankStatuses::key_type>;

/// Where a rank waits, and which reports concern it.
struct Position {
  std::string group;
  std::string
      parent;  ///< the group that it was made from, whose failures also concern it; may be empty
  int rank = 0;
  int size = 1;
  int64_t call = 0;        ///< number of its last call
  bool or_before = false;  ///< the rank may also wait in an earlier call
};

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

/// Whether a rank that waits at `at` must stop waiting.
Verdict judge(const RankStatuses& statuses, const Position& at);

/// The known facts about a failure of a group.
struct Findings {
  std::map<int, std::string> reports;  ///< by rank, except this one: the collective that failed
                                       ///< there
  Proof proof;                         ///< about ranks without a report
};

/// `old`: reports that concern only the group they name.
Findings find(const RankStatuses& statuses, const Position& at, const ReportKeys& old = {});

}  // namespace apex::parallel
