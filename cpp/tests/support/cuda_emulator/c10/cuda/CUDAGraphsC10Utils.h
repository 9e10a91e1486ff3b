// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <support/fake_capture.h>
#include <support/fake_device.h>

/// Stand-in for torch's header of this name: captures of the fake device.

constexpr int cudaStreamCaptureModeRelaxed = 2;

namespace c10::cuda {

enum class CaptureStatus : int { None = 0, Active = 1 };

inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  using namespace apex::testing::fake;
  return Capture::of(current_stream().id()) != 0 ? CaptureStatus::Active : CaptureStatus::None;
}

struct CUDAStreamCaptureModeGuard {
  explicit CUDAStreamCaptureModeGuard(int) {}
};

}  // namespace c10::cuda
