// SPDX-License-Identifier: BSD-3-Clause
// Oracle: a table of the ranks' reports and the resulting decision of another rank.

#include "watch/rank_status.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace apex::parallel {
namespace {

RankStatus failed(const std::string& what, const std::vector<int64_t>& refused = {},
                  bool over = false) {
  RankStatus status;
  status.failure = RankStatus::Failure{what, {}, refused, over};
  return status;
}

/// Rank 0 of 2, in its call 3 of group "own", which was made from "parent".
Position here() { return {"own", "parent", 0, 2, 3}; }

TEST(RankStatus, Encoded_IsDecodedAsItWas) {
  RankStatus status = failed("a \"b\" \\ of\ntwo lines", {3, 12}, true);
  status.failure->proof = {{2, "has ended"}, {7, ""}};
  const RankStatus read = RankStatus::decode(status.encode());
  ASSERT_TRUE(read.failure);
  EXPECT_EQ(read.failure->what, status.failure->what);
  EXPECT_EQ(read.failure->proof, status.failure->proof);
  EXPECT_EQ(read.failure->refused, (std::vector<int64_t>{3, 12}));
  EXPECT_TRUE(read.failure->over);
  const RankStatus nothing = RankStatus::decode(RankStatus().encode());
  EXPECT_FALSE(nothing.failure);
}

TEST(RankStatus, Judge_WhoWaitsGivesUpIfItsGroupHasFailed) {
  const auto kind = [](const std::string& group, const RankStatus& status) {
    return judge({{{1, group}, status}}, here()).kind;
  };
  EXPECT_EQ(judge({}, here()).kind, Verdict::kOk);
  EXPECT_EQ(kind("own", failed("a")), Verdict::kFailed);
  EXPECT_EQ(kind("parent", failed("a")), Verdict::kFailed);
  EXPECT_EQ(kind("another made from parent", failed("a")), Verdict::kOk);
  EXPECT_EQ(kind("own", failed("a", /*refused=*/{3})), Verdict::kFailed);
  EXPECT_EQ(kind("own", failed("a", /*refused=*/{2})), Verdict::kOk);
  // Refused twice, before this rank has reached the first call.
  EXPECT_EQ(kind("own", failed("a", /*refused=*/{3, 4})), Verdict::kFailed);
  EXPECT_EQ(kind("parent", failed("a", /*refused=*/{3})), Verdict::kOk);
  // Over for a rank that has continued in the parent, but not for one that still waits.
  EXPECT_EQ(kind("own", failed("a", {}, /*over=*/true)), Verdict::kFailed);
}

// Over NCCL the GPU may wait in an earlier call than the last.
TEST(RankStatus, Judge_CallsThatOthersRefused_CountUpToWhereTheGpuWaitsUnlessRefusedHere) {
  Position there = here();
  there.or_before = true;
  const auto kind = [&](const std::vector<int64_t>& theirs, const std::vector<int64_t>& own) {
    RankStatuses all{{{1, "own"}, failed("a", theirs)}};
    if (!own.empty()) all[{0, "own"}] = failed("a", own);
    return judge(all, there).kind;
  };
  EXPECT_EQ(kind({2}, {}), Verdict::kFailed);
  EXPECT_EQ(kind({3}, {1}), Verdict::kFailed);
  EXPECT_EQ(kind({4}, {}), Verdict::kOk);
  EXPECT_EQ(kind({2}, {2}), Verdict::kOk);
  EXPECT_EQ(kind({1, 2}, {2, 1}), Verdict::kOk);
  EXPECT_EQ(kind({1, 2}, {1}), Verdict::kFailed);
  EXPECT_EQ(judge({{{0, "own"}, failed("a", {2})}}, there).kind, Verdict::kOk);
  // Refusals in another group do not matter, but a failure concerns all calls.
  EXPECT_EQ(judge({{{1, "parent"}, failed("a", {2})}}, there).kind, Verdict::kOk);
  EXPECT_EQ(judge({{{1, "own"}, failed("a")}, {{0, "own"}, failed("a", {2})}}, there).kind,
            Verdict::kFailed);
}

TEST(RankStatus, DecodedFromWhatIsNoStatus_ReportsNothingAboutAnybody) {
  for (const char* text : {"", "hello", "0 0", "-1 7", "1", "1 1", "\n\n"})
    EXPECT_TRUE(!RankStatus::decode(text).failure ||
                RankStatus::decode(text).failure->proof.empty())
        << text;
  const RankStatus cut = RankStatus::decode("1 \"a\" 0 99999999999 5");
  ASSERT_TRUE(cut.failure);
  EXPECT_EQ(cut.failure->refused, std::vector<int64_t>{5});
  EXPECT_TRUE(cut.failure->proof.empty());
}

TEST(RankStatus, Find_TakesWhatStillCounts) {
  RankStatus proven = failed("c");
  proven.failure->proof = {{0, "is stopped"}, {1, "has ended"}, {3, "has ended"}};
  const Findings findings = find({{{0, "own"}, failed("mine")},
                                  {{1, "parent"}, failed("a")},
                                  {{1, "own"}, failed("b")},
                                  {{2, "another made from parent"}, proven}},
                                 here());
  EXPECT_EQ(findings.reports, (std::map<int, std::string>{{1, "b"}, {2, "c"}}));
  // Rank 1 has reported since, and this rank was stopped and continues.
  EXPECT_EQ(findings.proof, (Proof{{3, "has ended"}}));
  // From an earlier failure, of the other group.
  const RankStatuses earlier{{{1, "another"}, proven}, {{1, "own"}, failed("b")}};
  EXPECT_TRUE(find({{{1, "another"}, proven}}, here(), {{1, "another"}}).reports.empty());
  EXPECT_EQ(find(earlier, here(), {{1, "another"}, {1, "own"}}).reports.at(1), "b");
  const auto reports = [](const std::string& group, const RankStatus& status) {
    return find({{{1, group}, status}}, here()).reports.size();
  };
  EXPECT_EQ(reports("own", failed("a", {}, /*over=*/true)), 1U);
  EXPECT_EQ(reports("own", failed("a", /*refused=*/{3}, /*over=*/true)), 0U);
  EXPECT_EQ(reports("another", failed("a", {}, /*over=*/true)), 0U);
}

}  // namespace
}  // namespace apex::parallel
