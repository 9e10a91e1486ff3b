// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <string>

namespace apex::kernels {

/// Bytes of the last cache that a core sees; 32 MiB where the system does not tell.
size_t last_cache_bytes();

/// Of the caches that a folder of Linux's describes (/sys/devices/system/cpu/cpuN/cache); 0 if
/// none.
size_t last_cache_bytes(const std::string& folder);

}  // namespace apex::kernels
