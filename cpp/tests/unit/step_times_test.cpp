// SPDX-License-Identifier: BSD-3-Clause
#include "step/step_times.h"

#include <chrono>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace apex::parallel::detail {
namespace {

using std::chrono::milliseconds;

constexpr StepClock::Time kBegin{};

std::string name(size_t parameter) { return "p" + std::to_string(parameter); }

TEST(StepClock, BeforeTheFirstEnd_NothingIsKnown) {
  StepClock clock;
  clock.backward_began(kBegin, {});
  clock.gradient_ready(0, kBegin + milliseconds(1), {});
  EXPECT_EQ(clock.times(kBegin + milliseconds(2), {}).own, 0);
}

TEST(StepClock, WhatWasWaited_IsNotItsOwn) {
  StepClock clock;
  clock.ended(kBegin, milliseconds(5));
  clock.backward_began(kBegin + milliseconds(100), milliseconds(35));
  clock.gradient_ready(3, kBegin + milliseconds(110), milliseconds(35));
  clock.gradient_ready(1, kBegin + milliseconds(170), milliseconds(55));  // 40 ms of them its own
  clock.gradient_ready(0, kBegin + milliseconds(180), milliseconds(55));
  const StepTimes times = clock.times(kBegin + milliseconds(200), milliseconds(60));
  EXPECT_EQ(times.own, 145000);
  EXPECT_EQ(times.backward, 75000);
  EXPECT_EQ(times.gap, 40000);
  EXPECT_EQ(times.gap_from, 3);
  EXPECT_EQ(times.gap_to, 1);
}

TEST(StepClock, AfterAFailure_TheNextStepDoesNotCount) {
  StepClock clock;
  clock.ended(kBegin, {});
  clock.dropped();
  clock.backward_began(kBegin + milliseconds(1), {});
  EXPECT_EQ(clock.times(kBegin + milliseconds(2), {}).own, 0);
}

// A gap lies within one backward.
TEST(StepClock, NextBackward_ForgetsTheGap) {
  StepClock clock;
  clock.ended(kBegin, {});
  clock.backward_began(kBegin, {});
  clock.gradient_ready(0, kBegin + milliseconds(50), {});
  clock.ended(kBegin + milliseconds(60), {});
  clock.backward_began(kBegin + milliseconds(70), {});
  clock.gradient_ready(2, kBegin + milliseconds(71), {});
  const StepTimes times = clock.times(kBegin + milliseconds(72), {});
  EXPECT_EQ(times.gap, 1000);
  EXPECT_EQ(times.gap_from, -1);
  EXPECT_EQ(times.gap_to, 2);
}

/// All times in milliseconds.
StepTimes times(double own, double backward, double gap = 0, int32_t from = 0, int32_t to = 1) {
  StepTimes made;
  made.own = static_cast<int64_t>(own * 1000);
  made.backward = static_cast<int64_t>(backward * 1000);
  made.gap = static_cast<int64_t>(gap * 1000);
  made.gap_from = from;
  made.gap_to = to;
  return made;
}

TEST(StepHistory, NoStep_HasNoRanks) {
  const StragglerReport report = StepHistory().report(name);
  EXPECT_EQ(report.steps, 0);
  EXPECT_TRUE(report.ranks.empty());
  EXPECT_EQ(report.straggler, -1);
  EXPECT_FALSE(to_string(report).empty());
}

TEST(StepHistory, RankThatDoesNotKnow_StepDoesNotCount) {
  StepHistory history;
  history.add({times(1, 1), StepTimes()});
  EXPECT_EQ(history.report(name).steps, 0);
}

TEST(StepHistory, SleepInBackwardOfOneRank_IsItsBetweenThoseParameters) {
  StepHistory history;
  for (int step = 0; step < 20; ++step) {
    std::vector<StepTimes> ranks(4, times(30, 20, 3, 5, 4));
    ranks[1] = times(230, 220, 202, 7, 6);
    history.add(ranks);
  }
  const StragglerReport report = history.report(name);
  EXPECT_EQ(report.steps, 20);
  EXPECT_EQ(report.straggler, 1);
  const RankTimes& one = report.ranks[1];
  EXPECT_DOUBLE_EQ(one.own_s, 0.23);
  EXPECT_DOUBLE_EQ(one.backward_s, 0.22);
  EXPECT_NEAR(one.before_backward_s, 0.01, 1e-9);
  EXPECT_NEAR(one.ratio, 230.0 / 30, 1e-9);
  EXPECT_DOUBLE_EQ(one.last_share, 1);
  EXPECT_DOUBLE_EQ(one.gap_s, 0.202);
  EXPECT_EQ(one.gap_from_name, "p7");
  EXPECT_EQ(one.gap_to_name, "p6");
  EXPECT_NE(to_string(report).find("between the gradients of 'p7' and 'p6'"), std::string::npos)
      << to_string(report);
}

TEST(StepHistory, SlowDataOnOneRank_IsBeforeBackward) {
  StepHistory history;
  for (int step = 0; step < 20; ++step) history.add({times(80, 20, 3), times(30, 20, 3)});
  const StragglerReport report = history.report(name);
  EXPECT_EQ(report.straggler, 0);
  EXPECT_NE(to_string(report).find("50.0 ms more before backward"), std::string::npos)
      << to_string(report);
}

// One rank is five percent slower, with noise of five percent; and equal ranks with noise.
TEST(StepHistory, FivePercentSlower_IsFoundWithin200StepsAndEqualRanksAreNot) {
  std::mt19937 random(1);
  std::lognormal_distribution<double> noise(0, 0.05);
  int found = 0, blamed = 0;
  constexpr int kTimes = 100;
  for (int time = 0; time < kTimes; ++time) {
    StepHistory slow, equal;
    for (int step = 0; step < 200; ++step) {
      std::vector<StepTimes> ranks, same;
      for (int rank = 0; rank < 4; ++rank) {
        const double own = 30 * noise(random);
        ranks.push_back(times(own * (rank == 2 ? 1.05 : 1), own / 2));
        same.push_back(times(30 * noise(random), 15));
      }
      slow.add(ranks);
      equal.add(same);
    }
    found += slow.report(name).straggler == 2 ? 1 : 0;
    blamed += equal.report(name).straggler >= 0 ? 1 : 0;
  }
  EXPECT_EQ(found, kTimes);
  EXPECT_EQ(blamed, 0);
}

TEST(StepHistory, FewSteps_NobodyIsBlamed) {
  StepHistory history;
  for (int step = 0; step < 9; ++step) history.add({times(80, 20), times(30, 20)});
  EXPECT_EQ(history.report(name).straggler, -1);
  history.add({times(80, 20), times(30, 20)});
  EXPECT_EQ(history.report(name).straggler, 0);
}

TEST(StepHistory, ManySteps_TheLastOnesCount) {
  StepHistory history;
  for (int step = 0; step < 300; ++step) history.add({times(80, 20), times(30, 20)});
  for (size_t step = 0; step < StepHistory::kSteps; ++step)
    history.add({times(30, 20), times(40, 20)});
  const StragglerReport report = history.report(name);
  EXPECT_EQ(report.steps, static_cast<int64_t>(StepHistory::kSteps));
  EXPECT_EQ(report.straggler, 1);
  EXPECT_DOUBLE_EQ(report.ranks[0].own_p95_s, 0.03);
}

}  // namespace
}  // namespace apex::parallel::detail
