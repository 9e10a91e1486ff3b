// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What a rank reports about itself to the other ranks of a group, and the conclusions from all
/// ranks' reports. Pure.

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace apex::parallel {

// Note [Channels]
//
// Collectives are matched by their order in a channel: a process group, or a group that was made
// from it. All channels made from one group share its record: a failure in one of them fails all.
// Threads may use different channels of a group in any order.

/// What happened to the process of each rank, such as "has ended (process 17)".
using Proof = std::map<int, std::string>;

/// The last collectives that a rank has called in one channel.
struct CallLog {
  static constexpr size_t kKept = 8;

  int64_t number = 0;             ///< of the last call; 0: no call yet
  std::deque<std::string> names;  ///< of the last calls, the latest last

  void add(const std::string& what);
  /// The name of call `at`; empty if it is not known.
  std::string name_of(int64_t at) const;
};

/// One rank's report.
struct RankRecord {
  std::string channel;                   ///< in which it waits, or has made its last call
  int64_t call = 0;                      ///< number of that call; 0: none yet
  std::string what;                      ///< name of that call
  bool waits = false;                    ///< whether it is still waiting in it
  double seconds = 0;                    ///< since the wait, or the call, began
  int64_t asked = 0;                     ///< how often ranks had asked when it answered
  std::map<std::string, CallLog> calls;  ///< by channel of the group
  std::string state;                     ///< further lines about the process; with a failure, the
                                         ///< stall report that this rank has printed
  std::string failure;                   ///< the collective that has failed on this rank; or empty
  std::string cause;                     ///< of the failure, if it is in this rank's own code
  Proof proof;                           ///< about other ranks

  std::string encode() const;
  static RankRecord decode(const std::string& text);
};

using RankRecords = std::map<int, RankRecord>;

/// "rank 3", "ranks 1, 2"; a long list is shortened.
std::string list_of(const std::vector<int>& ranks);

/// The known facts about a failure of a group.
struct Findings {
  RankRecords reports;  ///< of failures, by rank, except this one
  Proof proof;          ///< about ranks without a report
};

/// Which ranks are lost, according to the ranks that report a failure.
Findings dead(const RankRecords& records, int rank);

// Note [Ranks in different collectives]
//
// If ranks call different collectives, Gloo pairs messages of one kind and lets other ranks wait
// until the timeout. So every rank numbers its calls of a channel. If two ranks have made
// different calls under the same number, and neither has made the other's call later, they are
// certainly in different collectives, however late either rank is. (Two threads that number their
// calls at the same time may issue them in the other order.)

/// "rank 1 is in: c, while rank 0 is in: b" for the first number with different calls, or an empty
/// text.
std::string apart(int rank, const RankRecord& mine, int other, const RankRecord& theirs);

/// A stall, as seen by the rank that reports it.
struct Stall {
  int rank = 0;
  int size = 1;
  RankRecord mine;
  RankRecords others;       ///< their latest reports
  Proof processes;          ///< processes of this host that have exited or are stopped
  bool on_device = false;   ///< a GPU waits while this rank's host continues
  double seconds_left = 0;  ///< until the group's timeout; negative: unknown
  std::string note;         ///< which ranks of the job these are; may be empty
};

/// Whether `rank` waits in the same call, as far as is known. Over a GPU: its host has made it.
bool waits_too(const Stall& stall, int rank);

/// The ranks that hold the others up: those that are in no collective, and otherwise those that
/// have made the fewest calls. Over a GPU, ranks whose host has not made the call.
std::vector<int> late(const Stall& stall);

/// The report as lines: which rank is late, where it is, the likely cause, and the remedy.
std::string describe(const Stall& stall);

}  // namespace apex::parallel
