// SPDX-License-Identifier: BSD-3-Clause
#include "comm/by_group.h"

#include <memory>

#include <gtest/gtest.h>
#include <support/stored_group.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace apex::parallel {
namespace {

c10::intrusive_ptr<c10d::ProcessGroup> make_group() {
  return testing::make_stored_groups(2, "group", c10::make_intrusive<c10d::HashStore>())[0];
}

TEST(ByGroup, FindsWhatWasPutLast_UntilItIsTaken) {
  ByGroup<int> by_group;
  const auto one = make_group(), other = make_group();
  by_group.put(*one, 1);
  by_group.put(*one, 2);
  ASSERT_NE(by_group.find(*one), nullptr);
  EXPECT_EQ(*by_group.find(*one), 2);
  EXPECT_EQ(by_group.find(*other), nullptr);
  EXPECT_EQ(by_group.take(*one), 2);
  EXPECT_EQ(by_group.take(*one), std::nullopt);
  EXPECT_EQ(by_group.find(*one), nullptr);
}

// The address of an expired group could otherwise be reused by another group.
TEST(ByGroup, GroupsThatAreGone_AreTakenAndNoOtherHasTheirAddress) {
  ByGroup<std::shared_ptr<int>> by_group;
  const auto stays = make_group();
  by_group.put(*stays, std::make_shared<int>(0));
  for (int i = 1; i <= 100; ++i) {
    const auto group = make_group();
    ASSERT_EQ(by_group.find(*group), nullptr);
    by_group.put(*group, std::make_shared<int>(i));
  }
  EXPECT_EQ(by_group.size(), 101u);
  EXPECT_EQ(by_group.take_gone().size(), 100u);
  EXPECT_EQ(by_group.size(), 1u);
  EXPECT_EQ(**by_group.find(*stays), 0);
  EXPECT_EQ(stays.use_count(), 1u);
}

}  // namespace
}  // namespace apex::parallel
