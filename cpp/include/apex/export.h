// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>  // defines the macros of the standard library

/// Symbol visibility. The library is built with hidden visibility; APEX_API marks public symbols.

#if defined(__GLIBCXX__) && !_GLIBCXX_USE_CXX11_ABI
#error \
    "libtorch and apex are built with the C++11 ABI of libstdc++: compile without -D_GLIBCXX_USE_CXX11_ABI=0"
#endif

#define APEX_API __attribute__((visibility("default")))
