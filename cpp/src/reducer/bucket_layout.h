// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Where the gradients of a bucket lie in its message. Pure: no tensors.

#include <cstdint>
#include <vector>

namespace apex::parallel::detail {

struct BucketLayout {
  std::vector<int64_t> offsets;  ///< by member: its first element
  int64_t numel = 0;             ///< of all: without gaps
};

/// Lays out gradients of `numel` elements of `element_bytes` each. The message holds the gradients
/// and nothing else. Those whose size is a multiple of 16 bytes come first, each aligned to that,
/// so that copies of them can use vector loads and stores; the others follow. Within both, in the
/// order given.
BucketLayout lay_out(const std::vector<int64_t>& numel, int64_t element_bytes);

}  // namespace apex::parallel::detail
