// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/freed_memory.h"

#include <atomic>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace apex::parallel::detail {

void return_freed_memory(size_t bytes) noexcept {
  constexpr size_t kAtOnce = size_t{64} << 20;
  static std::atomic<size_t> freed{0};
  if (freed.fetch_add(bytes) + bytes < kAtOnce) return;
  freed = 0;
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

}  // namespace apex::parallel::detail
