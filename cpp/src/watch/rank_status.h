// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A rank's report about a group after a problem, and the decisions that follow from all ranks'
/// reports. Pure.

#include <cstdint>
#include <map>
#include <optional>
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
  };
  /// See Note [Hooks that fail].
  struct Hook {
    int64_t generation = 0;  ///< number of earlier failures on all ranks
    int64_t position = 0;    ///< twice the number of a call, plus one for the call's hook
    bool begun = false;      ///< the hook may have issued its collective
    std::string what;
    std::string cause;
  };
  std::optional<Failure> failure;
  std::optional<Hook> hook;

  std::string encode() const;
  static RankStatus decode(const std::string& text);
};

/// Reports by rank and by name of the group concerned. A group and the groups made from it, which
/// have the same ranks, share them, and fail together.
using RankStatuses = std::map<std::pair<int, std::string>, RankStatus>;

/// Where a rank waits, and which reports concern it.
struct Position {
  std::string group;
  int rank = 0;
  int size = 1;
  int64_t call = 0;  ///< number of its last call
  bool in_hook = false;
  int64_t generation = 0;  ///< generation of hook failures
};

/// The findings of a waiting rank.
struct Verdict {
  enum Kind {
    kOk,      ///< other ranks may just be late
    kFailed,  ///< another rank reports that a collective of the group has failed
    kHook,    ///< the communication hook of another rank has failed; text: which one, and the cause
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

/// Whether the hooks of all ranks have failed in the same call; nullopt if a report is missing.
std::optional<bool> hooks_alike(const RankStatuses& statuses, const Position& at);

/// The known facts about a failure of a group.
struct Findings {
  std::map<int, std::string> reports;  ///< by rank, except this one: the collective that failed
                                       ///< there
  Proof proof;                         ///< about ranks without a report
};

Findings find(const RankStatuses& statuses, int rank);

}  // namespace apex::parallel
