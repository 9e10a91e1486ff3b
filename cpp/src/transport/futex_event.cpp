// SPDX-License-Identifier: BSD-3-Clause
#include "transport/futex_event.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace apex::parallel {

// No lost wakeup: either notify() sees the sleeper's count, or the kernel sees the new value of
// count_.

void FutexEvent::notify() noexcept {
  count_.fetch_add(1);
  APEX_HOST_STEP("rung");
  if (sleepers_.load() == 0) return;
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
            0);
}

void FutexEvent::wait(uint32_t seen, std::chrono::nanoseconds longest) noexcept {
  sleepers_.fetch_add(1);
  APEX_HOST_STEP("sleeps");
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  timespec time{};
  time.tv_sec = seconds.count();
  time.tv_nsec = static_cast<long>((longest - seconds).count());
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAIT, seen, &time, nullptr, 0);
  sleepers_.fetch_sub(1);
}

}  // namespace apex::parallel
