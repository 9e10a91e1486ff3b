// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/Device.h>

/// Stand-in for torch's header of this name: there is one fake device.

namespace c10::cuda {

struct CUDAGuard {
  explicit CUDAGuard(c10::Device) {}
};

}  // namespace c10::cuda
