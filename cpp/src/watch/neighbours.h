// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The thread of this process that watches the processes of this host's other ranks, and steps the
/// boards.

#include <map>

#include "watch/process_state.h"

namespace apex::parallel {

// Note [The watching thread]
//
// A process has one, which is not joined: a call of the store may block it. It wakes every kTick,
// at once for wake_watcher() and wake_process(), and when a process ends.
//
// The error of a waiting rank names the lost rank after some 100 ms, when other ranks have had time
// to report. A launcher has killed the waiting ranks by then: torchrun polls its processes every
// 100 ms. So the thread polls the pidfd of each process of this host that belongs to a rank of a
// group. When a process ends with an error while this rank waits in a group of that rank, the
// thread prints one line to stderr. A process that ends with exit code 0 is left to the error, and
// so is one that has reported a failure without a cause of its own.
//
// The survivors fail soon after, so later ends within some seconds are not reported.

/// Starts the thread, or wakes it: it takes a step of each board.
void start_watching();
void wake_watcher();

/// Makes a process of this host look for news of its groups, whatever its threads do. A datagram to
/// its thread; lost where the processes do not share a network namespace.
void wake_process(const ProcessName& process);

/// From now on the end of `process` is noticed. Thread safe.
void watch_process(const ProcessName& process);

/// Prints the line if a process has ended with an error and a thread waits for it. Cheap otherwise.
void report_ended_processes();

/// The processes of the job's ranks on this host, by rank, as far as the launcher has started them
/// as children of one thread with RANK in their environment, as torchrun and multiproc do; empty
/// if these are not `rank` and all `size` ranks of the job. Needs no store, so it also names a rank
/// that ends before it uses a group.
std::map<int, ProcessName> launched_ranks(int rank, int size);

}  // namespace apex::parallel
