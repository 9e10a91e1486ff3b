// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "reducer/step_facts.h"

namespace apex::parallel {
namespace {

/// What an all-reduce of the encoded facts tells.
SeenFacts seen_by_all(const std::vector<StepFacts>& ranks) {
  uint32_t bits = 0;
  for (const StepFacts& facts : ranks) bits |= facts.encode();
  return SeenFacts(bits);
}

std::vector<StepDetails> details_of(const std::vector<StepFacts>& ranks) {
  std::vector<StepDetails> details;
  for (const StepFacts& facts : ranks) {
    StepDetails one;
    one.facts = facts;
    one.backward = 7;
    details.push_back(StepDetails::decode(one.encode().data()));
  }
  return details;
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST(StepFacts, EveryFact_AloneOnOneRank_IsSeen) {
  bool StepFacts::* const questions[] = {&StepFacts::idle_step, &StepFacts::updated,
                                         &StepFacts::updated_locally};
  for (const auto question : questions) {
    std::vector<StepFacts> ranks(3);
    EXPECT_FALSE(seen_by_all(ranks).differ());
    ranks[1].*question = true;
    EXPECT_TRUE(seen_by_all(ranks).differ());
    for (StepFacts& facts : ranks) facts.*question = true;
    EXPECT_FALSE(seen_by_all(ranks).differ());  // alike on all
    ranks[0].*question = false;
    ranks[0].compared = false;
    EXPECT_FALSE(seen_by_all(ranks).differ());  // gives no answer
  }
}

TEST(StepFacts, RankThatSkips_IsSeen_AndItsAnswersCount) {
  std::vector<StepFacts> ranks(2);
  ranks[1].skips = true;
  EXPECT_TRUE(seen_by_all(ranks).skipped());
  EXPECT_FALSE(seen_by_all(ranks).differ());
  ranks[1].updated = true;
  EXPECT_TRUE(seen_by_all(ranks).differ());
  ranks[1].failed = true;
  EXPECT_TRUE(seen_by_all(ranks).skipped() && seen_by_all(ranks).failed());
}

TEST(StepFacts, RankThatFailedOrLeft_IsSeen_AndItsAnswersDoNotCount) {
  std::vector<StepFacts> ranks(2);
  ranks[0].updated = true;
  ranks[0].failed = true;
  EXPECT_TRUE(seen_by_all(ranks).failed());
  EXPECT_TRUE(seen_by_all(ranks).differ());
  ranks[0].failed = false;
  ranks[0].left_plan = true;
  EXPECT_TRUE(seen_by_all(ranks).plan_left() && seen_by_all(ranks).plan_kept());
  EXPECT_TRUE(seen_by_all(ranks).differ());
  ranks[1].left_plan = true;
  EXPECT_FALSE(seen_by_all(ranks).plan_kept());
  EXPECT_FALSE(seen_by_all(ranks).differ());
  ranks[1].wants_rebuild = true;
  EXPECT_TRUE(seen_by_all(ranks).rebuild_wanted());
}

TEST(StepFacts, Difference_Described_NamesRanksAndWhatTheyDid) {
  std::vector<StepFacts> ranks(3);
  ranks[2].idle_step = true;
  expect_contains(describe_difference(0, details_of(ranks)),
                  "rank 0: the ranks are out of step: rank 2 stepped an optimizer twice without a "
                  "backward between, rank 0, rank 1 did not");
  ranks[2].failed = true;
  expect_contains(describe_difference(1, details_of(ranks)),
                  "rank 1: backward number 7 was ended by an exception on rank 2");
  ranks[2] = {};
  ranks[0].left_plan = true;
  auto details = details_of(ranks);
  details[0].reason = static_cast<int64_t>(ReasonToLeave::kRelearn);
  expect_contains(describe_difference(1, details),
                  "rank 0 asked for a new bucket plan (relearn())");
}

TEST(StepFacts, UpdatesThatDiffer_Described_OnlyIfParametersDo) {
  std::vector<StepFacts> ranks(2);
  ranks[1].updated = true;
  auto details = details_of(ranks);
  EXPECT_TRUE(needs_digests(details));
  EXPECT_EQ(describe_difference(0, details), "");  // a sharded optimizer, say
  details[1].digest = 5;
  expect_contains(describe_difference(0, details), "rank 1 updated the parameters");
  ranks[1].idle_step = true;
  EXPECT_FALSE(needs_digests(details_of(ranks)));  // out of step in any case
  EXPECT_NE(describe_difference(0, details_of(ranks)), "");
}

TEST(StepFacts, ParametersMovedFurtherOnOneRank_IsSeen_AndDescribedOnlyIfParametersDiffer) {
  for (const double factor : {1.42, 1.9, 2.0, 3.0, 4.0, 5.0}) {
    for (const double distance : {1e-30, 0.3, 0.5, 1.0, 12345.0}) {
      std::vector<StepFacts> ranks(3);
      for (StepFacts& facts : ranks) facts.moved = distance;
      EXPECT_FALSE(seen_by_all(ranks).differ());
      ranks[1].moved = factor * distance;
      EXPECT_TRUE(seen_by_all(ranks).differ()) << factor << " of " << distance;
      auto details = details_of(ranks);
      EXPECT_TRUE(needs_digests(details));
      EXPECT_EQ(describe_difference(0, details), "");
      details[1].digest = 5;
      expect_contains(describe_difference(0, details),
                      "rank 1 moved the parameters further since the last synchronized backward "
                      "than rank 0, rank 2, as by a step of an optimizer too many");
    }
  }
}

// Processors of two kinds round differently: the least that can be is a limit between two levels.
TEST(StepFacts, ParametersMovedAlmostAlike_IsNoDifference) {
  std::vector<StepFacts> ranks(2);
  ranks[0].moved = 1.0;
  ranks[1].moved = 0.999999;
  EXPECT_TRUE(seen_by_all(ranks).differ());
  auto details = details_of(ranks);
  EXPECT_FALSE(needs_digests(details));
  details[1].digest = 5;
  EXPECT_EQ(describe_difference(0, details), "");
}

TEST(StepFacts, MovedByNothingOrByNan_IsNoAnswer) {
  for (const double nothing :
       {0.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    std::vector<StepFacts> ranks(2);
    ranks[0].moved = 1.0;
    ranks[1].moved = nothing;
    EXPECT_FALSE(seen_by_all(ranks).differ());
    auto details = details_of(ranks);
    details[1].digest = 5;
    EXPECT_EQ(describe_difference(0, details), "");
  }
}

TEST(StepFacts, CommunicationHookThatFailedOnSomeRanks_HooksAreApart) {
  std::vector<StepDetails> ranks(2);
  EXPECT_FALSE(hooks_are_apart(ranks));
  ranks[0].hook_failed = true;
  EXPECT_TRUE(hooks_are_apart(ranks));
  ranks[1].hook_failed = true;
  EXPECT_FALSE(hooks_are_apart(ranks));
}

}  // namespace
}  // namespace apex::parallel
