// SPDX-License-Identifier: BSD-3-Clause
#include "comm/futex_event.h"

#include <climits>

#include "comm/host_step.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#else
#include <algorithm>
#include <thread>
#endif

namespace apex::parallel {

// No lost wakeup: either notify() sees the sleeper's count, or the kernel sees the new value of
// count_.

void FutexEvent::notify() noexcept {
  count_.fetch_add(1);
  APEX_HOST_STEP("rung");
#if defined(__linux__)
  if (sleepers_.load() == 0) return;
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
            0);
#endif
}

void FutexEvent::wait(uint32_t seen, std::chrono::nanoseconds longest) noexcept {
  sleepers_.fetch_add(1);
  APEX_HOST_STEP("sleeps");
#if defined(__linux__)
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  timespec time{};
  time.tv_sec = seconds.count();
  time.tv_nsec = static_cast<long>((longest - seconds).count());
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count_), FUTEX_WAIT, seen, &time, nullptr, 0);
#else
  (void)seen;
  std::this_thread::sleep_for(
      std::min<std::chrono::nanoseconds>(longest, std::chrono::microseconds(100)));
#endif
  sleepers_.fetch_sub(1);
}

}  // namespace apex::parallel
