// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_layout.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

/// Table tests of layouts.

namespace apex::parallel {
namespace {

using Hosts = std::vector<std::vector<int>>;

TEST(HostLayout, HostsCountByTheirFirstRanks_RanksByTheGroup) {
  const std::vector<std::string> names{"b", "a", "b", "c", "a", "b"};
  const HostLayout layout = lay_out(names, 5);
  EXPECT_EQ(layout.hosts, (Hosts{{0, 2, 5}, {1, 4}, {3}}));
  EXPECT_EQ(layout.host, 0);
  EXPECT_EQ(layout.place, 2);
  EXPECT_EQ(layout.places(), 3);
  EXPECT_EQ(lay_out(names, 4).host, 1);
}

TEST(HostLayout, OneHost_OneRankOnEach_OrDifferentNumbers_IsNotWorthwhile) {
  EXPECT_FALSE(lay_out({"a", "a", "a"}, 1).worthwhile());
  EXPECT_FALSE(lay_out({"a", "b", "c"}, 1).worthwhile());
  EXPECT_FALSE(lay_out({"a", "b", "a"}, 1).worthwhile());
  EXPECT_TRUE(lay_out({"a", "b", "a", "b"}, 1).worthwhile());
}

TEST(EqualPart, PartsFollowEachOther_AndDifferByOneAtMost) {
  for (const int64_t numel : {0, 1, 2, 7, 64, 1000, 70001}) {
    for (const int parts : {1, 2, 3, 5, 64}) {
      int64_t at = 0;
      for (int i = 0; i < parts; ++i) {
        const auto [begin, end] = equal_part(numel, parts, i);
        EXPECT_EQ(begin, at);
        EXPECT_GE(end - begin, numel / parts);
        EXPECT_LE(end - begin, numel / parts + 1);
        at = end;
      }
      EXPECT_EQ(at, numel);
    }
  }
}

}  // namespace
}  // namespace apex::parallel
