// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Stream marks without a GPU.

#include <functional>
#include <memory>

#include "distributed/backends.h"

namespace apex::testing {

/// Creates the marks of apex::distributed::make_stream_mark() in this program; if empty, they are
/// null.
inline std::function<std::unique_ptr<distributed::StreamMark>()> stream_marks;

inline std::unique_ptr<distributed::StreamMark> make_stream_mark() {
  return stream_marks ? stream_marks() : nullptr;
}

}  // namespace apex::testing
