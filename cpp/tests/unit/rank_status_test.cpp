// SPDX-License-Identifier: BSD-3-Clause
// Oracle: a table of the ranks' reports and the resulting decision of another rank.

#include "watch/rank_status.h"

#include <map>
#include <string>

#include <gtest/gtest.h>

namespace apex::parallel {
namespace {

TEST(RankStatus, Encoded_IsDecodedAsItWas) {
  const RankStatus status{"a \"b\" \\ of\ntwo lines", {{2, "has ended"}, {7, ""}}};
  const RankStatus read = RankStatus::decode(status.encode());
  EXPECT_EQ(read.what, status.what);
  EXPECT_EQ(read.proof, status.proof);
}

TEST(RankStatus, DecodedFromWhatIsNoStatus_ReportsNothingAboutAnybody) {
  for (const char* text : {"", "hello", "0 0", "-1 7", "1", "1 1", "\n\n"})
    EXPECT_TRUE(RankStatus::decode(text).proof.empty()) << text;
  EXPECT_LE(RankStatus::decode("\"a\" 99999999999 5").proof.size(), 1U);
}

TEST(RankStatus, Find_TakesReportsOfOthersAndProofAboutRanksWithoutOne) {
  const Proof proof{{0, "is stopped"}, {1, "has ended"}, {3, "has ended"}};
  const Findings findings = find({{0, {"mine", {}}}, {1, {"b", {}}}, {2, {"c", proof}}}, 0);
  EXPECT_EQ(findings.reports, (std::map<int, std::string>{{1, "b"}, {2, "c"}}));
  // Rank 1 has reported since, and this rank was stopped and continues.
  EXPECT_EQ(findings.proof, (Proof{{3, "has ended"}}));
}

}  // namespace
}  // namespace apex::parallel
