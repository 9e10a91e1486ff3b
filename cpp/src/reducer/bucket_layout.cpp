// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/bucket_layout.h"

#include <cstddef>

namespace apex::parallel::detail {

namespace {

constexpr int64_t kAlignmentBytes = 16;

}  // namespace

BucketLayout lay_out(const std::vector<int64_t>& numel, int64_t element_bytes) {
  BucketLayout layout;
  layout.offsets.resize(numel.size());
  for (const bool aligned : {true, false}) {
    for (size_t i = 0; i < numel.size(); ++i) {
      if ((numel[i] * element_bytes % kAlignmentBytes == 0) != aligned) continue;
      layout.offsets[i] = layout.numel;
      layout.numel += numel[i];
    }
  }
  return layout;
}

}  // namespace apex::parallel::detail
