// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <string>

#include <apex/export.h>

namespace apex::parallel {

/// The last verdict that this process has printed about ranks that waited for long: who holds them
/// up, where that rank is, why that may be and what to do. Empty if it has printed none.
///
/// A rank that waits in a collective of this library for APEX_STALL_SECONDS (a variable of the
/// environment; 10 by default, 0 is never; at most a third of the group's timeout) is in a stall.
/// One of the ranks that wait then prints a verdict to its standard error. Over CPU backends with a
/// store, and over NCCL, where the GPU is what waits: there a rank is named if its host has not
/// made the call yet, and nothing is printed while all have. Does not block; thread safe.
APEX_API std::string stall_report();

/// Adds lines about what this process is doing, which its verdicts and those of other ranks show
/// where this rank holds others up; "step 17, loading data". `read` is called on a thread of the
/// library, also while the main thread is busy; it must not throw, or wait for other ranks. Thread
/// safe.
APEX_API void add_state_reader(std::function<std::string()> read);

/// Calls `callback` with each text about other ranks that the library writes to standard error:
/// verdicts, and that a communicator was aborted since a rank is gone. It is called on a thread of
/// the library, which other work waits for: it must not block or wait for other ranks. Replaces the
/// callback before; an empty one removes it. Thread safe.
APEX_API void on_notice(std::function<void(const std::string& text)> callback);

}  // namespace apex::parallel
