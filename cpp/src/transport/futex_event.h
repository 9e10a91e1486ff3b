// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A futex event in shared memory, to wait for another process.

#include <atomic>
#include <chrono>
#include <cstdint>

// Named points of a protocol between processes of one host. Tests define the macro to kill or stop
// a process at each of them.
#ifndef APEX_HOST_STEP
#define APEX_HOST_STEP(name) ((void)0)
#endif

namespace apex::parallel {

/// Lives in shared memory. Call notify() after a change there. To wait for a change, read count(),
/// check the condition, then wait() with that number. Thread safe. If a process is killed while it
/// waits, it still counts as a sleeper, which costs each notify() a system call.
class FutexEvent {
 public:
  uint32_t count() const { return count_.load(); }
  void notify() noexcept;
  /// Blocks until count() differs from `seen`, or for `longest`; may return early.
  void wait(uint32_t seen, std::chrono::nanoseconds longest) noexcept;

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace apex::parallel
