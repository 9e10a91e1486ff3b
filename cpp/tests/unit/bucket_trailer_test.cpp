// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <vector>

#include <ATen/ATen.h>

#include "reducer/bucket_trailer.h"

namespace apex::parallel::detail {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

TEST(BucketTrailer, SumOverRanks_ReadBack_IsTheUnionInEveryDtype) {
  const BucketTrailer trailer({4, 0, 2}, 5);
  ASSERT_EQ(trailer.numel(), 8);
  for (const at::ScalarType dtype : kDtypes) {
    at::Tensor sum = at::zeros({8}, dtype);
    const std::vector<std::vector<uint8_t>> used{{1, 1, 0, 1, 0}, {0, 1, 0, 1, 0}};
    const std::vector<uint32_t> facts{0b00001, 0b10001};
    for (size_t rank = 0; rank < used.size(); ++rank) {
      const at::Tensor mine = at::full({8}, 7, dtype);  // what lies there does not matter
      trailer.write(mine, used[rank], facts[rank]);
      sum += mine;
    }
    std::vector<uint8_t> any(5, 0);
    BucketTrailer::read_used({&trailer}, {sum}, any);
    EXPECT_EQ(any, (std::vector<uint8_t>{1, 0, 0, 0, 0})) << dtype;  // 1 and 3 are not reported
    EXPECT_EQ(trailer.read_facts(sum), 0b10001u) << dtype;
  }
}

TEST(BucketTrailer, OneRankOfVeryMany_AveragedInHalf_IsStillSeen) {
  const BucketTrailer trailer({0}, 1);
  for (const at::ScalarType dtype : kDtypes) {
    const at::Tensor mine = at::empty({2}, dtype);
    trailer.write(mine, {1}, 1);
    const at::Tensor average = mine / 16384;
    std::vector<uint8_t> any(1, 0);
    BucketTrailer::read_used({&trailer}, {average}, any);
    EXPECT_EQ(any[0], 1) << dtype;
    EXPECT_EQ(trailer.read_facts(average), 1u) << dtype;
  }
}

TEST(BucketTrailer, NoUsedParameters_Written_MaskIsZero) {
  const BucketTrailer trailer({0, 1}, 0);
  const at::Tensor mine = at::full({2}, 3.0);
  trailer.write(mine, {}, 0);
  EXPECT_TRUE(mine.eq(0).all().item<bool>());
  EXPECT_EQ(trailer.read_facts(mine), 0u);
}

TEST(BucketTrailer, KnownUsed_ReadBack_IsNeverTakenBack) {
  const BucketTrailer trailer({0, 1}, 0);
  std::vector<uint8_t> any{1, 0};
  BucketTrailer::read_used({&trailer}, {at::zeros({2})}, any);
  EXPECT_EQ(any, (std::vector<uint8_t>{1, 0}));
}

}  // namespace
}  // namespace apex::parallel::detail
