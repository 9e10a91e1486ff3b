// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <vector>

#include "reducer/bucket_layout.h"

namespace apex::parallel::detail {
namespace {

TEST(BucketLayout, AnySizes_LaidOut_NoElementIsSharedAndNoneIsLeftOver) {
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{}, {0}, {7}, {4, 4}, {3, 8, 0, 1, 4, 5}, {1, 1, 1}, {16, 2, 16}}) {
    for (const int64_t element_bytes : {2, 4, 8}) {
      const BucketLayout layout = lay_out(sizes, element_bytes);
      std::vector<int> owners(static_cast<size_t>(layout.numel), 0);
      for (size_t i = 0; i < sizes.size(); ++i) {
        for (int64_t e = 0; e < sizes[i]; ++e) ++owners[static_cast<size_t>(layout.offsets[i] + e)];
      }
      for (const int count : owners) EXPECT_EQ(count, 1);
    }
  }
}

TEST(BucketLayout, SizesOfWholeVectors_AmongOthers_AreAligned) {
  const std::vector<int64_t> sizes{3, 8, 1, 4, 2};
  const BucketLayout layout = lay_out(sizes, 4);
  EXPECT_EQ(layout.offsets, (std::vector<int64_t>{12, 0, 15, 8, 16}));
  for (const size_t i : {1, 3}) EXPECT_EQ(layout.offsets[i] * 4 % 16, 0);
}

}  // namespace
}  // namespace apex::parallel::detail
