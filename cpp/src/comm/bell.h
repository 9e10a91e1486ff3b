// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// To sleep until another process has done something.

#include <atomic>
#include <chrono>
#include <cstdint>

namespace apex::parallel {

/// In memory that processes share; rung whenever anything there has changed. To miss nothing, ask
/// for rings(), look at what is waited for, and only then sleep until there are more of them.
/// Thread safe. A process that is killed while it sleeps counts as a sleeper ever after, which
/// costs those who ring a system call.
class Bell {
 public:
  uint32_t rings() const { return rings_.load(); }
  void ring() noexcept;
  /// Blocks until it has been rung since there were so many rings, or for so long; may return
  /// early.
  void sleep(uint32_t heard, std::chrono::nanoseconds longest) noexcept;

 private:
  std::atomic<uint32_t> rings_{0};
  std::atomic<uint32_t> sleepers_{0};
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace apex::parallel
