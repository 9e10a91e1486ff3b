// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Marks in the stream of a GPU that is not there.

#include <functional>
#include <memory>

#include "distributed/backends.h"

namespace apex::testing {

/// What apex::distributed::make_stream_mark() gives in this program; empty: null.
inline std::function<std::unique_ptr<distributed::StreamMark>()> stream_marks;

inline std::unique_ptr<distributed::StreamMark> make_stream_mark() {
  return stream_marks ? stream_marks() : nullptr;
}

}  // namespace apex::testing
