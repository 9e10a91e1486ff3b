// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Determines why a rank waits in a collective, from other ranks' reports and from the state of
/// their processes.

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

#include "watch/watched_group.h"

namespace apex::parallel {

// Note [Who is lost]
//
// A backend reports that a neighbour's connection is closed, or a timeout, but not which rank
// caused it. In a ring, a rank that waits for a survivor sees the survivor's connection close once
// the survivor gives up. So a rank whose collective fails reports that in the group's store
// immediately, and then reads the other ranks' reports:
//
// - A rank that waits in a collective of that group for longer than usual looks for reports, sees
//   the failure, and gives up as well, instead of waiting for ranks that will not join.
// - Every rank knows the processes of the ranks on its own host, and checks whether they have
//   exited or are stopped. This proof is passed on to ranks on other hosts, and ends the wait.
// - Without proof, the error names the ranks that have not reported when patience ends: they are
//   stopped, cut off, or in another part of the program.

// Note [When the store is lost]
//
// Usually the process that hosts the store is a rank. When it exits, no rank can report any more.
// Gloo also does not always notice a closed connection (one in a few hundred killed ranks), and a
// rank would then wait until the timeout. So it checks the processes of its host, and gives up once
// one has exited and neither the collective nor the store makes progress for two more seconds.

// Note [Stalls]
//
// The watching thread also watches this rank's waits. When one has lasted for 0.4 of the stall
// time, it publishes that in the store, and asks. The other ranks of its host are woken; those of
// other hosts look for news from time to time. Each answers with its own position and activity, on
// the watching thread, since the main thread may be busy. A rank that has answered that it is in no
// collective, and then starts to wait, corrects that. When the stall time has passed, each waiting
// rank reads the positions from rank 0 on, compares the calls with its own, see
// Note [Ranks in different collectives], and stops at one that waits in the same call: the lowest
// of these reads all, and prints which rank is late. If the collective fails later, its report of
// the failure has the same text, for the errors of the others. Ranks that wait in different calls
// for the same rank may print one report each. The procedure repeats after 4, 16, ... times the
// stall time.
//
// Over NCCL the GPU waits while the host continues, possibly several calls ahead. So the thread
// checks whether the last launched collective has completed. If it does not for the stall time, the
// rank asks the others. A busy GPU looks the same as a waiting one, so a rank counts as late only
// if its host has not made the call yet.

/// Records that this rank calls the collective `what` of `group`; see
/// Note [Ranks in different collectives].
APEX_API void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept;

/// Scope of a wait of this thread for other ranks of `group` in `what`, usually its last call.
class Wait {
 public:
  using Clock = WatchedGroup::Clock;

  /// @param connects  no connection exists yet that would break if a rank is killed
  Wait(const c10d::ProcessGroup& group, const std::string& what, bool connects = false);
  ~Wait();
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

  /// Why the wait will not end; empty while other ranks may just be late. Does not block: the
  /// watching thread calls the store.
  std::string poll();

  const std::string& what;
  const Clock::time_point since = Clock::now();

 private:
  void report_alone();
  std::string lost_process();

  const WatchedGroupPtr group_;
  const bool connects_;
  bool reported_ = false;                 ///< see report_alone()
  Clock::time_point look_at_, ended_at_;  ///< see lost_process()
};

/// Watches the waits of this process in the channels of `board`. On its thread.
void watch_waits(Board& board);

/// Records that this rank has launched `work`, the collective `what` of `group`, which the host
/// does not wait for. Not while a graph is captured.
void remember_launched(const c10d::ProcessGroup& group, const std::string& what,
                       const c10::intrusive_ptr<c10d::Work>& work) noexcept;

/// A text for the error of a rank on which the collective `what` of `group` has failed: which ranks
/// are lost, where other ranks have failed, and the stall report before that. Blocks for at most an
/// eighth of the group's timeout (but half a second), and five seconds at most; less than one
/// second if a process of this host has exited. The first result is reused. Never throws.
/// @param cause  what this rank's own code has raised; the other ranks report it too.
std::string report_failure(const c10d::ProcessGroup& group, const std::string& what,
                           const std::string& cause = {}) noexcept;

/// For a rank that leaves `what` of `group` without an error of a collective, or throws instead of
/// calling it: makes the ranks that wait in it give up. Waits briefly for the store.
void announce_failure(const c10d::ProcessGroup& group, const std::string& what,
                      const std::string& cause = {}) noexcept;

/// Whether a collective of the group, or of a group that shares its board, has failed on this rank.
bool has_failed(const c10d::ProcessGroup& group) noexcept;

}  // namespace apex::parallel
