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
/// store; ranks do not wait on the host for NCCL. Does not block; thread safe.
APEX_API std::string stall_report();

/// Adds lines about what this process is doing, which its verdicts and those of other ranks show
/// where this rank holds others up; "step 17, loading data". `read` is called on a thread of the
/// library, also while the main thread is busy; it must not throw, or wait for other ranks. Thread
/// safe.
APEX_API void add_state_reader(std::function<std::string()> read);

}  // namespace apex::parallel
