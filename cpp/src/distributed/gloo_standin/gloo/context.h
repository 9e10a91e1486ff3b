// SPDX-License-Identifier: BSD-3-Clause
// Stand-in, see gloo.cpp.
#pragma once

#include <chrono>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
}  // namespace gloo
