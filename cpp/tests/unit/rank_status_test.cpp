// SPDX-License-Identifier: BSD-3-Clause
// Oracle: a table of the ranks' reports and the resulting decision of another rank.

#include "watch/rank_status.h"

#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace apex::parallel {
namespace {

RankStatus failed(const std::string& what) {
  RankStatus status;
  status.failure = RankStatus::Failure{what, {}};
  return status;
}

RankStatus hook(int64_t position, bool begun = false, int64_t generation = 0,
                const std::string& what = "h") {
  RankStatus status;
  status.hook = RankStatus::Hook{generation, position, begun, what, "why"};
  return status;
}

/// Rank 0 of 2, in its call 3 of group "own", which was made from group "".
Position here(bool in_hook = false) { return {"own", 0, 2, 3, in_hook, 0}; }

TEST(RankStatus, Encoded_IsDecodedAsItWas) {
  RankStatus status = failed("a \"b\" \\ of\ntwo lines");
  status.failure->proof = {{2, "has ended"}, {7, ""}};
  status.hook = hook(5, true, 2).hook;
  const RankStatus read = RankStatus::decode(status.encode());
  ASSERT_TRUE(read.failure && read.hook);
  EXPECT_EQ(read.failure->what, status.failure->what);
  EXPECT_EQ(read.failure->proof, status.failure->proof);
  EXPECT_EQ(read.hook->generation, 2);
  EXPECT_EQ(read.hook->position, 5);
  EXPECT_TRUE(read.hook->begun);
  EXPECT_EQ(read.hook->what + read.hook->cause, "hwhy");
  const RankStatus nothing = RankStatus::decode(RankStatus().encode());
  EXPECT_FALSE(nothing.failure || nothing.hook);
}

TEST(RankStatus, Judge_WhoWaitsGivesUpIfItsGroupHasFailed) {
  EXPECT_EQ(judge({}, here()).kind, Verdict::kOk);
  EXPECT_EQ(judge({{{1, ""}, failed("a")}}, here()).kind, Verdict::kFailed);
}

TEST(RankStatus, DecodedFromWhatIsNoStatus_ReportsNothingAboutAnybody) {
  for (const char* text : {"", "hello", "0 0", "-1 7", "1", "1 1", "\n\n"})
    EXPECT_TRUE(!RankStatus::decode(text).failure ||
                RankStatus::decode(text).failure->proof.empty())
        << text;
  const RankStatus cut = RankStatus::decode("1 0 \"a\" 99999999999 5");
  ASSERT_TRUE(cut.failure);
  EXPECT_LE(cut.failure->proof.size(), 1U);
}

TEST(RankStatus, Judge_HookThatFailedBefore_IsNamed) {
  const auto kind = [](const RankStatus& status, bool in_hook = false) {
    return judge({{{1, "own"}, status}}, here(in_hook)).kind;
  };
  EXPECT_EQ(kind(hook(5)), Verdict::kHook);  // in call 2
  EXPECT_EQ(kind(hook(6)), Verdict::kOk);    // this rank has not reached it yet
  EXPECT_EQ(kind(hook(6), /*in_hook=*/true), Verdict::kHook);
  EXPECT_EQ(kind(hook(7), /*in_hook=*/true), Verdict::kOk);
  EXPECT_EQ(kind(hook(5, /*begun=*/true)), Verdict::kOk);
  EXPECT_EQ(kind(hook(5, false, /*generation=*/1)), Verdict::kOk);
  const Verdict first = judge({{{1, "own"}, hook(5)}, {{2, "own"}, hook(4)}}, here());
  EXPECT_EQ(first.text, "rank 2 reports that h failed there: why");
  // A rank that learns of a failed hook reports a failure.
  const Verdict later = judge({{{1, "own"}, hook(9)}, {{2, "own"}, failed("a")}}, here());
  EXPECT_EQ(later.kind, Verdict::kHook);
}

TEST(RankStatus, HooksAlike_AreSoIfAllFailedInTheSameCall) {
  const auto alike = [](const RankStatus& mine, std::optional<RankStatus> other) {
    RankStatuses all{{{0, "own"}, mine}};
    if (other) all[{1, "own"}] = *other;
    return hooks_alike(all, here());
  };
  EXPECT_EQ(alike(hook(6), std::nullopt), std::nullopt);
  EXPECT_EQ(alike(hook(6), hook(6, true)), true);
  EXPECT_EQ(alike(hook(6), hook(4)), false);
  EXPECT_EQ(alike(hook(6), hook(6, false, 0, "another")), false);
  EXPECT_EQ(alike(hook(6), failed("a")), false);
  // This rank's post has not come back yet, so the board shows its previous one.
  EXPECT_EQ(alike(hook(4, false, -1), hook(6)), std::nullopt);
  // A rank that has continued and then fails again.
  RankStatus past = hook(8, false, /*generation=*/1);
  past.failure = failed("a").failure;
  EXPECT_EQ(alike(hook(6), past), true);
}

TEST(RankStatus, Find_TakesReportsOfOthersAndProofAboutRanksWithoutOne) {
  RankStatus proven = failed("c");
  proven.failure->proof = {{0, "is stopped"}, {1, "has ended"}, {3, "has ended"}};
  const Findings findings =
      find({{{0, ""}, failed("mine")}, {{1, ""}, failed("b")}, {{2, ""}, proven}}, 0);
  EXPECT_EQ(findings.reports, (std::map<int, std::string>{{1, "b"}, {2, "c"}}));
  // Rank 1 has reported since, and this rank was stopped and continues.
  EXPECT_EQ(findings.proof, (Proof{{3, "has ended"}}));
}

}  // namespace
}  // namespace apex::parallel
