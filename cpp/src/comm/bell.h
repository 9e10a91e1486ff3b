// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A futex event in shared memory, to wait for another process.

#include <atomic>
#include <chrono>
#include <cstdint>

namespace apex::parallel {

/// Lives in shared memory and is rung after every change there. To miss no change: read rings(),
/// check the condition, then sleep() with that number. Thread safe. A process that is killed while
/// it sleeps stays counted as a sleeper, which costs each ring() a system call.
class Bell {
 public:
  uint32_t rings() const { return rings_.load(); }
  void ring() noexcept;
  /// Blocks until rings() differs from `heard`, or for `longest`; may return early.
  void sleep(uint32_t heard, std::chrono::nanoseconds longest) noexcept;

 private:
  std::atomic<uint32_t> rings_{0};
  std::atomic<uint32_t> sleepers_{0};
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace apex::parallel
