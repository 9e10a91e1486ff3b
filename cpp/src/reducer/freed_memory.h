// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>

namespace apex::parallel::detail {

/// Call it after large CPU tensors of this many bytes were freed, if their memory is not needed
/// soon. Returns free memory of the C library's allocator to the system, once per about 64 MiB.
/// Otherwise the allocator would keep all memory that is not at the end of its heap. Thread safe.
/// Does nothing if the C library is not glibc.
void return_freed_memory(size_t bytes) noexcept;

}  // namespace apex::parallel::detail
