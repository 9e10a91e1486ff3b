// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <string>

namespace apex::kernels {

/// Size of the last-level cache of a core, in bytes; 32 MiB if the system does not report it.
size_t last_cache_bytes();

/// The same from a folder such as Linux's /sys/devices/system/cpu/cpuN/cache; 0 if it describes no
/// cache.
size_t last_cache_bytes(const std::string& folder);

}  // namespace apex::kernels
