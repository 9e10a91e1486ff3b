// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <vector>

#include <ATen/ATen.h>

#include "reducer/recording.h"

namespace apex::parallel::detail {
namespace {

/// As the ranks' messages are combined.
AgreedRecording agree(const std::vector<Recording>& ranks) {
  at::Tensor maximum = encode(ranks.front());
  for (const Recording& rank : ranks) maximum = at::maximum(maximum, encode(rank));
  return decode(maximum, encode_order(ranks.front()));
}

Recording recording(std::vector<RecordedParameter> parameters, std::vector<int64_t> order) {
  Recording result;
  result.parameters = std::move(parameters);
  result.ready_order = std::move(order);
  return result;
}

TEST(Recording, RanksThatUsedDifferentParameters_Agreed_HoldsThoseOfAnyRank) {
  const Recording first =
      recording({{true, 0, 2, true}, {false, 0, 0, true}, {false, 0, 0, false}}, {0});
  const Recording second =
      recording({{true, 0, 1, true}, {true, 1, 1, true}, {false, 0, 0, true}}, {1, 0});
  const AgreedRecording agreed = agree({first, second});
  ASSERT_EQ(agreed.parameters.size(), 3u);
  EXPECT_TRUE(agreed.parameters[0].used && agreed.parameters[1].used);
  EXPECT_FALSE(agreed.parameters[2].used);
  EXPECT_EQ(agreed.parameters[1].sparse_dim, 1);
  EXPECT_EQ(agreed.parameters[0].fired, 2);
  EXPECT_TRUE(agreed.parameters[2].trainable);
  EXPECT_EQ(agreed.ready_order, (std::vector<int64_t>{0, 1}));  // rank 0's, then the others'
}

TEST(Recording, UsedElsewhereOnly_Agreed_ComeLastAndFromTheBack) {
  const RecordedParameter none{false, 0, 0, true}, used{true, 0, 1, true};
  const AgreedRecording agreed =
      agree({recording({none, used, none, none}, {1}), recording({used, none, used, none}, {})});
  EXPECT_EQ(agreed.ready_order, (std::vector<int64_t>{1, 2, 0}));
}

TEST(Recording, FactsAndSettings_Agreed_AnyFactHoldsAndOneDifferenceIsSeen) {
  Recording first = recording({{}}, {}), second = first, third = first;
  first.facts = 0b001;
  second.facts = 0b100;
  EXPECT_EQ(agree({first, second, third}).facts, 0b101u);
  EXPECT_TRUE(agree({first, second, third}).same_settings);
  third.settings = "another communication hook";
  EXPECT_FALSE(agree({first, second, third}).same_settings);
}

}  // namespace
}  // namespace apex::parallel::detail
