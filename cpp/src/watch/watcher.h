// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Who holds up a rank that waits in a collective: what the others have reported, and what can be
/// seen of their processes.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

#include "watch/rank_status.h"

namespace apex::parallel {

// Note [Who is lost]
//
// A backend tells that a neighbour's connection is gone, or that time is up; not which rank is to
// blame: with a ring, whoever waits for a survivor that has given up sees the survivor's connection
// close. So a rank whose collective fails says so in the group's store at once, and then looks what
// the others have to say:
//
// - a rank that waits in a collective of that group, and for longer than usual, looks into the
//   store now and then, hears of the failure, and gives up, too, instead of waiting for those who
//   will not come;
// - every rank knows the processes of those on its own host, and sees whether they have ended or
//   are stopped. That is proof, which is passed on to ranks on other hosts, and with it nobody is
//   waited for;
// - without proof, those who have not said anything when patience ends are named: they are stopped,
//   cut off, or in another part of the program.
//
// The store may be on a process that is stopped: a call of it can block for ever. So all calls are
// made on one thread, and who wants to know looks at what that has found: see StatusBoard.

// Note [When the store is lost]
//
// As a rule the process that keeps the store is a rank. When it ends, nobody can report any more;
// and Gloo does not always notice that a connection has been closed (one in some hundred killed
// ranks), so that who waits would do so until the timeout. So it looks at the processes of its
// host, and gives up when one has ended and nothing has come of the collective, or of the store,
// for two seconds more. Those that end first are remembered: the others have given up.

// Note [Hooks that fail]
//
// A rank whose communication hook has failed has not issued the collective in which the hooks of
// the others may be waiting. Whatever it sends next over that communicator would be taken for it.
// So it sends nothing, says through the store in which call it has failed, and looks there what the
// others say:
//
// - all hooks have failed in the same call: nobody waits for anything, and all can go on;
// - a rank that waits for something behind that call, or for the hook in it, has heard, has given
//   up, and says so. Then the messages of the ranks do not match any more.
//
// A rank that waits for something before that call goes on waiting: it will come.

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
struct WatchedGroup;

/// Notes that this rank calls the collective `what` of `group`; see Note [Ranks in different
/// collectives]. Before the first, tells the others, through the group's store, which process this
/// is: when that has ended, every rank has done so.
APEX_API void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept;

/// While it lives, this rank waits in its last call of `group`. Of one thread at a time.
class Wait {
 public:
  enum Where {
    kInCall,
    kInHook,  ///< of that call
  };
  explicit Wait(const c10d::ProcessGroup& group, Where where = kInCall);
  /// The GPU waits in `call` or in one before it, while the host goes on.
  Wait(const c10d::ProcessGroup& group, int64_t call);
  ~Wait();
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

  /// What is known by now. Does not block: the store's thread asks the store.
  Verdict poll();

 private:
  struct State;
  struct Comparison;
  void begin(const c10d::ProcessGroup& group, bool in_hook);
  bool is_left_alone();
  void compare();

  std::unique_ptr<State> state_;
};

/// To be added to the error of a rank on which the collective `what` of `group` has failed: who is
/// lost, and where others have failed. Empty without a store. Blocks for at most an eighth of the
/// group's timeout, five seconds at most, plus two on the rank that keeps the store; for less than
/// one if a process of this host has ended. What was found is returned at once for ten seconds.
/// Never throws.
std::string report_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept;

/// For a rank that throws instead of calling the collective `what` of `group`, because of its
/// arguments: ranks that wait for it in that call hear of it, and give up. Blocks as the store
/// does, for no longer than report_failure().
void refuse_call(const c10d::ProcessGroup& group, const std::string& what) noexcept;

/// For a rank that leaves a collective of `group` without an error of that: those who wait in it
/// give up. Blocks as above.
void announce_failure(const c10d::ProcessGroup& group, const std::string& what) noexcept;

/// Whether ranks that wait in `group`, or in one that shares its board, were told that this rank
/// does not: what it does next matters to them.
bool others_wait(const c10d::ProcessGroup& group);

/// What this rank has printed because its last call of `group` took long; else an empty text.
std::string stall_verdict(const c10d::ProcessGroup& group);

/// Whether one of these was called for it on this rank, but refuse_call().
bool has_failed(const c10d::ProcessGroup& group) noexcept;

/// For a rank whose communication hook has failed in `what`, the last call of `group`, one of the
/// `groups` of a reducer: tells the others, with the `cause`, and returns whether the hooks of all
/// ranks have failed there. If not, the groups have failed. Blocks until the others are there, for
/// the group's timeout at most; `meanwhile` is called now and then, and may throw. For groups that
/// hears_reports() is true of.
///
/// `begun`: the hook may have issued its collective. Then the others are waited for less long.
bool hooks_failed_alike(const std::vector<GroupPtr>& groups, const GroupPtr& group,
                        const std::string& what, const std::string& cause, bool begun,
                        std::chrono::milliseconds timeout, const std::function<bool()>& meanwhile);

}  // namespace apex::parallel
