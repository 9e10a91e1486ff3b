// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What the ranks of a group tell each other when a collective has failed.

#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

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
// made on a connection of their own, on a thread that is left behind when time is up.

/// Notes that this rank calls the collective `what` of `group`; see Note [Ranks in different
/// collectives]. Before the first, tells the others, through the group's store, which process this
/// is: when that has ended, every rank has done so.
APEX_API void begin_call(const c10d::ProcessGroup& group, const std::string& what) noexcept;

/// Who waits in `group` hears also of failures of `other`, which has the same ranks. For groups
/// that nobody uses apart from it, as a failure of `other` is one of `group` from then on. After a
/// first collective of `other`.
void hear_too(const c10d::ProcessGroup& group, const c10d::ProcessGroup& other) noexcept;

/// Reads which process each rank is, so that it is known when the store is lost. After a first
/// collective of the group. Returns at once if it was called before.
void remember_processes(const c10d::ProcessGroup& group) noexcept;

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

/// Whether report_failure() was called for it on this rank.
bool has_failed(const c10d::ProcessGroup& group) noexcept;

}  // namespace apex::parallel
