// SPDX-License-Identifier: BSD-3-Clause
// Stand-in, see gloo.cpp.
#pragma once

namespace gloo::transport {
class Device;
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();  // not defined: nothing is emitted for this class
};
}  // namespace gloo::transport
