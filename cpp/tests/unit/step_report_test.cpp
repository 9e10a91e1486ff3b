// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "comm/membership.h"
#include "step/report_exchange.h"
#include "step/step_report.h"
#include "support/reducer_steps.h"

// Report rows without ranks: each is written, read and judged.

namespace apex::parallel {
namespace {

using apex::testing::expect_contains;

/// One rank's row, and its description of its parameters.
struct Row {
  StepReport report;
  std::vector<uint8_t> used;
  std::vector<bool> trainable;
};

std::vector<Row> rows(size_t ranks, size_t parameters = 3) {
  std::vector<Row> all(ranks);
  for (Row& row : all) {
    row.report.facts.sample = 1;
    row.used.assign(parameters, 1);
    row.trainable.assign(parameters, true);
  }
  return all;
}

StepTable table_of(const std::vector<Row>& all) {
  const size_t parameters = all.front().used.size();
  const size_t size = StepTable::row_size(parameters);
  std::vector<int64_t> words(all.size() * size);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    StepTable::encode(all[rank].report, all[rank].used, all[rank].trainable,
                      words.data() + rank * size);
  }
  return {std::move(words), all.size(), parameters};
}

std::string name_of(size_t parameter) { return "p" + std::to_string(parameter); }

std::string refused(const std::vector<Row>& all) { return table_of(all).why_refused(name_of); }

std::string difference(const std::vector<Row>& all) { return table_of(all).describe_difference(); }

TEST(StepReport, EveryField_WrittenAndRead_IsTheSame) {
  std::vector<Row> all = rows(2, 130);  // bits in three words
  StepReport& report = all[1].report;
  report.failed = report.without_data = report.ends_early = report.keeps_gradients = true;
  report.facts.local = true;
  report.facts.steps = 3;
  report.facts.compared = false;
  report.left = ReasonToLeave::kOwner;
  report.facts.moved = 0.1;
  report.facts.sample = std::numeric_limits<int64_t>::min();
  report.settings = -5;
  report.non_finite = 129;
  report.weight = 0.1;
  report.digest = 7;
  const StepReport read = table_of(all).of(1);
  EXPECT_EQ(std::memcmp(&read, &report, sizeof(read)), 0);  // no padding
  EXPECT_EQ(table_of(all).of(0).non_finite, -1);
}

TEST(StepReport, BitsOfParameters_AreThoseOfAnyRankAndOfEach) {
  for (const size_t parameters : {0, 1, 63, 64, 65, 200}) {
    std::vector<Row> all = rows(3, parameters);
    std::vector<uint8_t> any(parameters);
    for (size_t rank = 0; rank < 3; ++rank) {
      for (size_t i = 0; i < parameters; ++i) {
        all[rank].used[i] = i % 5 == rank ? 1 : 0;
        all[rank].trainable[i] = (i + rank) % 3 != 0;
        any[i] |= all[rank].used[i];
      }
    }
    const StepTable table = table_of(all);
    EXPECT_EQ(table.used_by_any(), any) << parameters;
    for (size_t rank = 0; rank < 3; ++rank) {
      for (size_t i = 0; i < parameters; ++i)
        EXPECT_EQ(table.trainable(rank, i), all[rank].trainable[i]) << parameters << ' ' << i;
    }
    EXPECT_EQ(table.trainable_set(), all[0].trainable);
    all[0].report.without_data = true;
    EXPECT_EQ(table_of(all).trainable_set(), all[1].trainable);
  }
}

TEST(StepReport, NothingToSay_IsNotRefused_AndNoDifference) {
  EXPECT_EQ(refused(rows(3)), "");
  EXPECT_EQ(difference(rows(3)), "");
  EXPECT_FALSE(table_of(rows(2)).skipped());
  EXPECT_EQ(table_of(rows(2)).describe_non_finite(name_of), "");
}

TEST(StepReport, RankThatFailed_IsNamed) {
  std::vector<Row> all = rows(3);
  all[2].report.failed = true;
  expect_contains(refused(all), "this backward was ended by an exception on rank 2");
  EXPECT_TRUE(table_of(all).any_failed());
}

TEST(StepReport, Weights_AreAddedInTheOrderOfRanks) {
  std::vector<Row> all = rows(3);
  all[0].report.weight = 1e16;
  all[1].report.weight = 1;
  all[2].report.weight = 0.5;
  EXPECT_EQ(refused(all), "");
  EXPECT_EQ(table_of(all).total_weight(), 1e16 + 1 + 0.5);
}

TEST(StepReport, WeightThatIsMissingNegativeOrInfinite_NamesItsRank_UnlessTheStepIsSkipped) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  std::vector<Row> all = rows(2);
  all[1].report.weight = kNan;
  expect_contains(refused(all), "rank 1 ran a backward outside weight(), or passed NaN");
  all[1].report.weight = -2;
  expect_contains(refused(all), "rank 1 passed the weight -2");
  all[1].report.weight = std::numeric_limits<double>::infinity();
  expect_contains(refused(all), "rank 1 passed the weight inf");
  all[0].report.weight = all[1].report.weight = 1.7e308;
  expect_contains(refused(all), "the sum of the weights of all ranks is not finite");
  all[0].report.skips = true;
  EXPECT_EQ(refused(all), "");
}

TEST(StepReport, WeightOfARankWithoutAGradient_MayBeMissing) {
  std::vector<Row> all = rows(2);
  all[0].report.weight = 3;
  all[1].report.weight = std::numeric_limits<double>::quiet_NaN();
  all[1].used.assign(3, 0);
  EXPECT_EQ(refused(all), "");
  EXPECT_EQ(table_of(all).total_weight(), 3);
}

TEST(StepReport, PlanLeftBySome_IsRefusedWithTheReason_AndByAllIsNot) {
  std::vector<Row> all = rows(3);
  all[0].report.left = ReasonToLeave::kRebuildBuckets;
  expect_contains(refused(all), "rank 0 requested a new bucket plan (rebuild_buckets())");
  EXPECT_FALSE(table_of(all).all_left());
  all[1].report.left = ReasonToLeave::kCommHook;
  all[2].report.without_data = true;  // follows the other ranks
  EXPECT_EQ(refused(all), "");
  EXPECT_TRUE(table_of(all).all_left());
}

TEST(StepReport, ParameterFrozenOnSomeRanks_IsNamedWithThem_BeforeThePlan) {
  std::vector<Row> all = rows(3);
  all[1].trainable[2] = false;
  all[1].report.left = ReasonToLeave::kOwner;
  expect_contains(refused(all),
                  "parameter 'p2' is frozen on rank 1 and trainable on rank 0, rank 2");
  for (Row& row : all) row.trainable[2] = false;
  for (Row& row : all) row.report.left = ReasonToLeave::kOwner;
  EXPECT_EQ(refused(all), "");
  all[0].trainable[0] = false;
  all[0].report.without_data = true;  // its row has no such information
  EXPECT_EQ(refused(all), "");
}

TEST(StepReport, SettingsAndSkips_OfOneRank_AreSeen) {
  std::vector<Row> all = rows(3);
  EXPECT_TRUE(table_of(all).same_settings());
  all[1].report.settings = 3;
  EXPECT_FALSE(table_of(all).same_settings());
  all[1].report.without_data = true;
  EXPECT_TRUE(table_of(all).same_settings());
  all[1].report.skips = true;
  EXPECT_TRUE(table_of(all).skipped());
}

TEST(StepReport, EveryDifference_OfEqualParametersOrOfARankThatIsNotCompared_IsNone) {
  for (const bool compared : {true, false}) {
    std::vector<Row> all = rows(3);
    all[1].report.facts.steps = 2;
    all[1].report.facts.moved = 5;
    if (compared) all[1].report.facts.sample = 5;
    all[2].report.facts.compared = false;
    if (!compared) all[2].report.facts.compared = true;
    EXPECT_EQ(difference(all), "");
  }
  std::vector<Row> all = rows(2);
  all[0].report.facts.sample = 0;  // unknown
  all[1].report.facts.moved = 5;
  EXPECT_EQ(difference(all), "");
}

TEST(StepReport, ParametersThatDiffer_AndMovedOnSomeRanksOnly_AreDescribed) {
  std::vector<Row> all = rows(3);
  all[1].report.facts.sample = 5;
  EXPECT_EQ(difference(all), "");  // samples alone decide nothing
  all[1].report.facts.moved = std::numeric_limits<double>::quiet_NaN();
  expect_contains(difference(all),
                  "the ranks are out of step: rank 1 updated the parameters since construction "
                  "or the last synchronized backward, rank 0, rank 2 did not");
  all[0].report.facts.local = true;
  EXPECT_EQ(difference(all), "");
}

TEST(StepReport, ParametersThatDiffer_AndOtherNumbersOfSteps_AreDescribed_AlsoAfterLocalBackwards) {
  for (const bool local : {false, true}) {
    std::vector<Row> all = rows(3);
    for (Row& row : all) row.report.facts.moved = 1;
    for (Row& row : all) row.report.facts.steps = 1;
    all[1].report.facts.sample = 5;
    all[1].report.facts.local = local;
    EXPECT_EQ(difference(all), "");
    all[1].report.facts.steps = 2;
    expect_contains(difference(all),
                    "rank 1 made another number of optimizer steps since construction or the last "
                    "synchronized backward than rank 0, rank 2: 2, not 1");
  }
}

TEST(StepReport, ParametersThatMovedFurtherOnOneRank_AreADifference_WhereDistancesAreMeasured) {
  for (const double factor : {1.42, 2.0, 5.0}) {
    for (const double distance : {1e-30, 0.3, 12345.0}) {
      std::vector<Row> all = rows(3);
      for (Row& row : all) row.report.facts.moved = distance;
      all[1].report.facts.sample = 5;
      EXPECT_EQ(difference(all), "");
      all[1].report.facts.moved = factor * distance;
      expect_contains(
          difference(all),
          "rank 1 changed the parameters by more since construction or the last "
          "synchronized backward than rank 0, rank 2, for example by an additional optimizer step");
      all[0].report.facts.local = true;  // sharpness-aware minimization: undone later
      EXPECT_EQ(difference(all), "");
      all[0].report.facts.local = false;
      for (Row& row : all) row.report.facts.measured = false;
      EXPECT_EQ(difference(all), "");
    }
  }
}

// Two kinds of processors may round differently.
TEST(StepReport, ParametersMovedAlmostAlikeOrToNan_IsNoDifference) {
  for (const double other : {0.999999, std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity()}) {
    std::vector<Row> all = rows(2);
    all[0].report.facts.moved = 1.0;
    all[1].report.facts.moved = other;
    all[1].report.facts.sample = 5;
    EXPECT_EQ(difference(all), "") << other;
  }
}

TEST(StepReport, Join_IsOver_WhenNoRankHasData_AndNamesARankThatHadDataToTheEnd) {
  std::vector<Row> all = rows(3);
  all[0].report.without_data = all[0].report.followed = true;
  EXPECT_EQ(table_of(all).ranks_with_data(), 2);
  for (Row& row : all) row.report.without_data = true;
  EXPECT_EQ(table_of(all).ranks_with_data(), 0);
  EXPECT_EQ(table_of(all).last_with_data(), 1);
  EXPECT_FALSE(table_of(all).all_left());
  all[0].report.followed = false;
  EXPECT_EQ(table_of(all).last_with_data(), -1);
}

TEST(StepReport, Join_EarlyTerminationAndKeptGradients_AreRefused) {
  std::vector<Row> all = rows(3);
  for (Row& row : all) row.report.ends_early = true;
  EXPECT_EQ(refused(all), "");
  all[1].report.without_data = true;
  expect_contains(refused(all), "rank 1 has run out of data");
  for (Row& row : all) row.report.without_data = true;
  EXPECT_EQ(refused(all), "");
  all[2].report.keeps_gradients = true;
  expect_contains(refused(all), "rank 2 added gradients to an average");
}

TEST(StepReport, GradientsThatAreNotFinite_AreNamedByRankAndParameter_AndCounted) {
  std::vector<Row> all = rows(3);
  all[1].report.non_finite = 2;
  all[2].report.non_finite = 0;
  const std::string text = table_of(all).describe_non_finite(name_of);
  expect_contains(text, "rank 1 contributed a gradient that is infinite or NaN for parameter 'p2'");
  expect_contains(text, "2 of 3 ranks");
}

TEST(ReportExchange, LookedAtWhileItIsReceived_IsReceivedOnce) {
  // Two ranks; this one is rank 0, and the sum holds its row only.
  Membership members;
  members.size = 2;
  detail::ReportExchange exchange(members, 3);
  const Row own = rows(1).front();
  const at::Tensor tail = at::zeros({detail::ReportExchange::tail_size(members, 3)}, at::kFloat);
  exchange.write(own.report, own.used, own.trainable, tail);
  int waits = 0;
  exchange.sent_behind([] { return true; },
                       [&](const std::function<void()>& meanwhile) {
                         ++waits;
                         if (meanwhile) meanwhile();
                         return tail;
                       });
  // Other reducers of a backward that look at all reports.
  const StepTable& table = exchange.receive([&] { EXPECT_EQ(exchange.peek(), nullptr); });
  EXPECT_EQ(waits, 1);
  EXPECT_TRUE(table.trainable(0, 2));
  EXPECT_FALSE(table.trainable(1, 2));
  EXPECT_EQ(exchange.peek(), &table);
}

}  // namespace
}  // namespace apex::parallel
