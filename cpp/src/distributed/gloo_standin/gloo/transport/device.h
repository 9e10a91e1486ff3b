// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Stand-in, see gloo.cpp.

namespace gloo {
namespace transport {

class Device;

class UnboundBuffer {
 public:
  // Declared and not defined: nothing is emitted for this class.
  virtual ~UnboundBuffer();
};

}  // namespace transport
}  // namespace gloo
