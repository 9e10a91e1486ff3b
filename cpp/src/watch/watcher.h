// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Determines why a rank waits in a collective, from other ranks' reports and from the state of
/// their processes.

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

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

/// Records that this rank calls the collective `what` of `group`; see
/// Note [Ranks in different collectives]. The first call publishes this rank's process through the
/// group's store, so once that collective completes, every rank has published its process.
APEX_API void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept;

/// Scope of a wait in this rank's last call of `group`. Used by one thread at a time.
class Wait {
 public:
  explicit Wait(const c10d::ProcessGroup& group);
  ~Wait();
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

  /// The findings so far. Does not block: the store's thread calls the store.
  Verdict poll();

 private:
  struct State;
  bool is_left_alone();

  std::unique_ptr<State> state_;
};

/// A text for the error of a rank on which the collective `what` of `group` has failed: which ranks
/// are lost, and where other ranks have failed. Empty without a store. Blocks for at most an eighth
/// of the group's timeout, and five seconds at most; less than one second if a process of this host
/// has exited. The result is reused for ten seconds. Never throws.
std::string report_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept;

/// For a rank that leaves `what` of `group` without an error of a collective, or throws instead of
/// calling it: makes the ranks that wait in it give up. Waits briefly for the store.
void announce_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept;

/// Whether this rank has reported that it does not wait. Its next wait must then correct that.
bool others_wait(const c10d::ProcessGroup& group);

/// The stall report about the last call of `group`, by whichever rank; else "". Waits briefly for
/// the store.
std::string stall_verdict(const c10d::ProcessGroup& group);

/// Whether a collective of the group, or of a group that shares its board, has failed on this rank.
bool has_failed(const c10d::ProcessGroup& group) noexcept;

}  // namespace apex::parallel
