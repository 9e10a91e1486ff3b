// SPDX-License-Identifier: BSD-3-Clause
#include "processor_cache.h"

#include <fstream>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace apex::kernels {

size_t last_cache_bytes(const std::string& folder) {
  size_t bytes = 0;
  int highest = 0;
  for (int index = 0;; ++index) {
    const std::string cache = folder + "/index" + std::to_string(index);
    std::ifstream level_file(cache + "/level"), size_file(cache + "/size");
    int level = 0;
    if (!(level_file >> level)) return bytes;
    size_t size = 0;
    char unit = ' ';
    if (level <= highest || !(size_file >> size)) continue;
    size_file >> unit;  // "32768K"
    highest = level;
    bytes = unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : size;
  }
}

size_t last_cache_bytes() {
  // sysconf() is only the fallback: on AMD processors it reports the sum of all last-level caches
  // of a socket (320 MiB with glibc 2.36, where each core has 32 MiB).
  static const size_t found = last_cache_bytes("/sys/devices/system/cpu/cpu0/cache");
  if (found > 0) return found;
#if defined(__linux__) && defined(_SC_LEVEL3_CACHE_SIZE)
  const long size = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (size > 0) return static_cast<size_t>(size);
#endif
  constexpr size_t kUsual = size_t{32} << 20;
  return kUsual;
}

}  // namespace apex::kernels
