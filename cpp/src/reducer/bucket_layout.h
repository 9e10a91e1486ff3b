// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The layout of gradients in the message of a bucket. Pure, without tensors.

#include <cstdint>
#include <vector>

namespace apex::parallel::detail {

struct BucketLayout {
  std::vector<int64_t> offsets;  ///< by member: its first element
  int64_t numel = 0;             ///< of all members; there are no gaps
};

/// Lays out gradients of `numel` elements of `element_bytes` each, without padding. Gradients whose
/// size is a multiple of 16 bytes come first and are aligned to 16 bytes, so that copies can use
/// vector loads and stores. The others follow. Both groups keep the given order.
BucketLayout lay_out(const std::vector<int64_t>& numel, int64_t element_bytes);

}  // namespace apex::parallel::detail
