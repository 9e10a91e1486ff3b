// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A thread that requests the GIL while the interpreter exits is terminated by an exception that
/// must not be swallowed: put `catch (APEX_FORCED_UNWIND) { throw; }` before `catch (...)`.

#if defined(__GLIBCXX__) || __has_include(<cxxabi.h>)
#include <cxxabi.h>
#endif

#ifdef __GLIBCXX__
#define APEX_FORCED_UNWIND abi::__forced_unwind&
#else
namespace apex::parallel {
struct NoForcedUnwind {};
}  // namespace apex::parallel
#define APEX_FORCED_UNWIND apex::parallel::NoForcedUnwind&
#endif
