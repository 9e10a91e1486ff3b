// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <string>

#include <apex/export.h>

namespace apex::parallel {

/// The last stall verdict that this process has printed: which rank the others wait for, where that
/// rank is, the likely cause and the remedy. Empty if it has printed none.
///
/// A rank is stalled when it waits in a collective of this library for APEX_STALL_SECONDS (an
/// environment variable; default 10, 0 turns the check off, at most a third of the group's
/// timeout). One of the waiting ranks then prints a verdict to stderr. This works over CPU backends
/// with a store, and over NCCL. Over NCCL it is the GPU that waits, so a verdict names a rank only
/// if its host has not made the call yet; otherwise nothing is printed. Does not block; thread
/// safe.
APEX_API std::string stall_report();

/// Adds lines about what this process is doing, such as "step 17, loading data". Verdicts of this
/// process and of other ranks show them if other ranks wait for this rank. `read` is called on a
/// thread of the library, even while the main thread is busy. It must not throw or wait for other
/// ranks. Thread safe.
APEX_API void add_state_reader(std::function<std::string()> read);

/// Calls `callback` with each text about other ranks that the library writes to stderr: stall
/// verdicts, ended processes, differences between replicas. It runs on a thread that the library
/// also uses for other work, so it must not block or wait for other ranks. Replaces the previous
/// callback; an empty one removes it. Thread safe.
APEX_API void on_notice(std::function<void(const std::string& text)> callback);

}  // namespace apex::parallel
