// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A Work of a CPU transport that the host waits for in short slices.

#include <algorithm>
#include <chrono>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <apex/error.h>

#include "distributed/backends.h"

namespace apex::parallel {

/// Has no future. c10d's wait(timeout) throws at the end of a slice, which costs more than the
/// slice.
class SlicedWork : public c10d::Work {
 public:
  using Work::Work;

  /// Blocks for at most `slice`; returns whether it has completed.
  /// @throws Error as wait() does.
  virtual bool wait_for(std::chrono::milliseconds slice) = 0;

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds kSlice{1000};
    const Clock::time_point end = timeout == kNoTimeout
                                      ? Clock::time_point::max()
                                      : Clock::now() + std::min<std::chrono::milliseconds>(
                                                           timeout, distributed::kLongestTimeout);
    for (;;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      if (wait_for(std::clamp(left, std::chrono::milliseconds(0), kSlice))) return true;
      if (Clock::now() >= end) throw Error("the collective has not completed in time");
    }
  }

  void synchronize() override { wait(); }

  /// Lets the other ranks complete it without this rank, which may not wait for it for a long time.
  virtual void leave() {}
};

}  // namespace apex::parallel
