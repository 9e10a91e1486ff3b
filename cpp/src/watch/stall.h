// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What this process prints, and answers to ranks that wait; see Note [Stalls].

#include <chrono>
#include <string>

#include "watch/watched_group.h"

namespace apex::parallel {

constexpr std::chrono::milliseconds kDefaultStallTime{10000};
/// The environment variable APEX_STALL_SECONDS, or the default; 0 turns reports off.
std::chrono::milliseconds stall_time();
inline bool reports_stalls() { return stall_time() > std::chrono::milliseconds(0); }
/// For tests.
void set_stall_time(std::chrono::milliseconds time);

/// Where this rank is: the collective in which it waits, or else its latest call.
RankRecord position(const Board& board);

/// Its last call of `group`, and whether a thread waits in the group.
RankRecord position_in(WatchedGroup& group);

/// Writes "apex: TEXT" to stderr and passes TEXT to the callback of on_notice(). Thread safe;
/// blocks only as long as the callback does.
void notify(const std::string& text);

/// Prints a report, which is then the result of stall_report().
void print_report(const std::string& text);

/// At process exit: stops answering, since a state reader may call Python, which must not be called
/// while the interpreter exits. Waits at most one second for an answer in progress, and for ranks
/// that read this rank's failure.
void end_answers();

}  // namespace apex::parallel
