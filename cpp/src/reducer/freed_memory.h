// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>

namespace apex::parallel::detail {

/// Large tensors on the CPU with so many bytes were freed, and their memory is not needed again
/// soon: gives what the C library's allocator holds of such back to the system, for some 64 MiB at
/// a time. It would keep what does not lie at the end of its heap. Thread safe. Does nothing where
/// the C library is not glibc.
void return_freed_memory(size_t bytes) noexcept;

}  // namespace apex::parallel::detail
