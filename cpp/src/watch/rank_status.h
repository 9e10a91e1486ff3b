// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What a rank reports about a group when something is wrong, and what follows from the reports of
/// all ranks. Pure.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace apex::parallel {

/// By rank: what has become of its process, "has ended (process 17)".
using Proof = std::map<int, std::string>;

/// What one rank has reported about one group.
struct RankStatus {
  /// A collective of the group has failed on this rank.
  struct Failure {
    std::string what;
    Proof proof;  ///< against others
    /// Not empty: the rank has thrown instead of making these calls, and goes on. A rank that is
    /// slow may still come to an earlier one.
    std::vector<int64_t> refused;
    bool over = false;  ///< the rank has gone on since, in the group that this one was made from
  };
  /// See Note [Hooks that fail].
  struct Hook {
    int64_t generation = 0;  ///< how many have failed on all ranks before
    int64_t position = 0;    ///< twice the number of a call, plus one for its hook
    bool begun = false;      ///< the hook may have issued its collective
    std::string what;
    std::string cause;
  };
  std::optional<Failure> failure;
  std::optional<Hook> hook;

  std::string encode() const;
  static RankStatus decode(const std::string& text);
};

/// By rank, and name of the group that it is about. Groups over the same ranks, of which one was
/// made from the other, share them.
using RankStatuses = std::map<std::pair<int, std::string>, RankStatus>;
using ReportKeys = std::set<RankStatuses::key_type>;

/// Whose reports count for a rank, and where it is.
struct Position {
  std::string group;
  std::string
      parent;  ///< the group that it was made from, whose failures are its own; may be empty
  int rank = 0;
  int size = 1;
  int64_t call = 0;  ///< the number of its last call
  bool in_hook = false;
  int64_t generation = 0;  ///< of hooks
  bool or_before = false;  ///< or in a call before that
};

/// What a rank that waits has found out.
struct Verdict {
  enum Kind {
    kOk,      ///< nothing is known but that other ranks are late
    kFailed,  ///< another rank reports that a collective of the group has failed
    kHook,    ///< the communication hook of another rank has failed; text: which, and why
    kApart,   ///< the ranks are in different collectives; text: which
    kLost,    ///< a process of the group has ended, and the store with it
  };
  Kind kind = kOk;
  std::string text;
};

/// "rank 3", "ranks 1, 2": of many, the first ones.
std::string list_of(const std::vector<int>& ranks);

/// Whether a rank that waits there has to give up.
Verdict judge(const RankStatuses& statuses, const Position& at);

/// Whether the hooks of all ranks have failed in the same call; nullopt: not all have reported.
std::optional<bool> hooks_alike(const RankStatuses& statuses, const Position& at);

/// What is known of a failure of the group at `at`.
struct Findings {
  std::map<int, std::string> reports;  ///< of other ranks: the collective that failed there
  Proof proof;                         ///< against those that have not reported
};

/// `old`: reports that count for their own group only.
Findings find(const RankStatuses& statuses, const Position& at, const ReportKeys& old = {});

}  // namespace apex::parallel
