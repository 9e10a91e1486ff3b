// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <vector>

#include <ATen/ATen.h>

#include "reducer/recording.h"

namespace apex::parallel::detail {
namespace {

/// Combines recordings as the ranks' messages do.
Recording agree(const std::vector<Recording>& ranks, const std::vector<uint8_t>& used_by_any) {
  at::Tensor maximum = encode(ranks.front());
  for (const Recording& rank : ranks) maximum = at::maximum(maximum, encode(rank));
  return decode(maximum, encode_order(ranks.front()), used_by_any);
}

TEST(Recording, RanksThatSawDifferentGradients_Agreed_HoldsTheMostOfAny) {
  const Recording first{{{0, 2}, {0, 0}, {0, 0}}, {0}};
  const Recording second{{{0, 1}, {1, 1}, {0, 0}}, {1, 0}};
  const Recording agreed = agree({first, second}, {1, 1, 0});
  ASSERT_EQ(agreed.parameters.size(), 3u);
  EXPECT_EQ(agreed.parameters[1].sparse_dim, 1);
  EXPECT_EQ(agreed.parameters[0].fired, 2);
  EXPECT_EQ(agreed.parameters[1].fired, 1);
  EXPECT_EQ(agreed.ready_order, (std::vector<int64_t>{0, 1}));  // rank 0's, then the others'
}

TEST(Recording, UsedElsewhereOnly_Agreed_ComeLastAndFromTheBack) {
  const Recording first{std::vector<RecordedParameter>(4), {1}};
  const Recording second{std::vector<RecordedParameter>(4), {}};
  EXPECT_EQ(agree({first, second}, {1, 1, 1, 0}).ready_order, (std::vector<int64_t>{1, 2, 0}));
}

}  // namespace
}  // namespace apex::parallel::detail
