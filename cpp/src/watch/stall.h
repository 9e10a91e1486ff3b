// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The stall time, and what this process answers to ranks that wait; see Note [Stalls].

#include <chrono>
#include <string>

#include "watch/watched_group.h"

namespace apex::parallel {

constexpr std::chrono::milliseconds kDefaultStallTime{10000};
/// The environment variable APEX_STALL_SECONDS, or the default; 0 turns reports off.
std::chrono::milliseconds stall_time();
/// For tests.
void set_stall_time(std::chrono::milliseconds time);

/// Where this rank is: the collective in which it waits, or else its latest call.
RankRecord position(const Board& board);

/// Its last call of `group`, and whether it waits in it.
RankRecord position_in(WatchedGroup& group, bool waits);

/// Prints a report, which is then the result of stall_report().
void print_report(const std::string& text);

/// At process exit: stops answering, since a state reader may call Python, which must not be called
/// while the interpreter exits. Waits at most one second for an answer in progress, and for ranks
/// that read this rank's failure.
void end_answers();

}  // namespace apex::parallel
