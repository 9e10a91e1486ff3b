// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A thread that asks for Python's lock while the interpreter ends is ended, by an exception that
/// has to get through: `catch (APEX_FORCED_UNWIND) { throw; }` before `catch (...)`.

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
