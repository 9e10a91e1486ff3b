// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The processes of this host's other ranks: reports at once that one has ended with an error, and
/// wakes them.

#include <map>

#include "watch/process_state.h"

namespace apex::parallel {

// Note [The early line]
//
// The error of a waiting rank names the lost rank after some 100 ms, when other ranks have had time
// to report. A launcher has killed the waiting ranks by then: torchrun polls its processes every
// 100 ms. So a thread polls the pidfd of each process of this host that belongs to a rank of a
// group. When a process ends with an error while this rank waits in a group of that rank, the
// thread prints one line to stderr. A process that ends with exit code 0 is left to the error.
//
// The survivors fail soon after, so later ends within some seconds are not reported.

/// From now on the end of `process` is noticed. Thread safe.
void watch_process(const ProcessName& process);

/// Starts the thread that watches processes, and listens to wake_process() of other processes.
void listen_to_neighbours();

/// Makes a process of this host look for news of its groups, whatever its threads do. A datagram to
/// its thread; lost where the processes do not share a network namespace.
void wake_process(const ProcessName& process);

/// The processes of the job's ranks on this host, by rank, as far as the launcher has started them
/// as children of one process with RANK in their environment, as torchrun and multiproc do. Needs
/// no store, so it also names a rank that ends before it uses a group. Read when the library is
/// loaded, and in each call.
std::map<int, ProcessName> launched_ranks() noexcept;

/// Prints the line if a process has ended with an error and a thread waits for it. Cheap otherwise.
void report_ended_processes();

}  // namespace apex::parallel
