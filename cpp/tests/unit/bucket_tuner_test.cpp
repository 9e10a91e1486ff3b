#include <gtest/gtest.h>

#include <vector>

#include "reducer/bucket_tuner.h"

namespace apex::parallel {
namespace {

TEST(BucketTuner, Candidates_Tried_TheFastestMedianIsKeptAndMeasuredAgain) {
  BucketTuner tuner;
  tuner.reset(2);
  const BucketPlan first{{{0, 1}}}, second{{{0}, {1}}}, third{{{1}, {0}}};
  const auto run = [&](double first_s, double s) {
    BucketTuner::Ask ask = BucketTuner::Ask::kNothing;
    for (int64_t step = 0; step < BucketTuner::kSteps; ++step) {
      EXPECT_EQ(ask, BucketTuner::Ask::kNothing);
      if (tuner.observing()) {
        tuner.gradient_at(0, 0.1 * static_cast<double>(step));
        tuner.gradient_at(1, 0.5);
      }
      ask = tuner.backward_took(step == 0 ? first_s : s);
    }
    return ask;
  };
  ASSERT_EQ(run(9.0, 2.0), BucketTuner::Ask::kPropose);  // the first backward is not counted
  EXPECT_NEAR(tuner.ready_s()[0], 0.3, 1e-12);
  EXPECT_EQ(tuner.ready_s()[1], 0.5);
  ASSERT_EQ(tuner.propose({first, second, third}), BucketTuner::Ask::kSwitch);
  EXPECT_TRUE(tuner.candidate() == second);
  ASSERT_EQ(run(9.0, 1.0), BucketTuner::Ask::kSwitch);
  EXPECT_TRUE(tuner.candidate() == third);
  ASSERT_EQ(run(0.1, 3.0), BucketTuner::Ask::kDecide);
  EXPECT_EQ(tuner.medians(), (std::vector<double>{2.0, 1.0, 3.0}));
  tuner.decide({2.0, 1.97, 3.0});  // that may be noise
  EXPECT_TRUE(tuner.candidate() == first);
  tuner.decide({2.0, 1.0, 3.0});
  EXPECT_TRUE(tuner.candidate() == second);
  for (int64_t step = 0; step < BucketTuner::kPatience; ++step) {
    EXPECT_EQ(tuner.phase(), BucketTuner::Phase::kKeep);
    EXPECT_EQ(tuner.backward_took(1.0), BucketTuner::Ask::kNothing);
  }
  EXPECT_EQ(tuner.phase(), BucketTuner::Phase::kObserve);
  EXPECT_EQ(run(1.0, 1.0), BucketTuner::Ask::kPropose);
  EXPECT_EQ(tuner.propose({second}), BucketTuner::Ask::kDecide);
}

}  // namespace
}  // namespace apex::parallel
