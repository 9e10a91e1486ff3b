// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "step/step_tracker.h"

namespace apex::parallel {
namespace {

/// Runs one synchronized step and returns its facts.
StepFacts step(StepTracker& tracker, bool changed = false) {
  tracker.backward_began(changed, /*touched_changed=*/false);
  tracker.gradient_arrived(/*synchronized=*/true);
  return tracker.facts();
}

TEST(StepTracker, OrdinarySteps_Facts_TellOnlyOfTheUpdate) {
  StepTracker tracker;
  for (int i = 0; i < 3; ++i) {
    const StepFacts facts = step(tracker, /*changed=*/i > 0);
    EXPECT_FALSE(facts.idle_step || facts.updated_locally);
    EXPECT_EQ(facts.updated, i > 0);
    tracker.optimizer_stepped(1);
  }
}

// Hazard: after a skipped step some ranks step their optimizer, which has no gradient, and others
// do not. A few such harmless differences would turn the comparison off.
TEST(StepTracker, StepAfterASkippedBackward_NextBackward_TellsOfNoUpdate) {
  StepTracker tracker;
  step(tracker);
  tracker.backward_skipped();
  tracker.optimizer_stepped(1);
  EXPECT_FALSE(step(tracker).updated);
  tracker.optimizer_stepped(1);
  EXPECT_TRUE(step(tracker).updated);
  tracker.backward_skipped();
  EXPECT_TRUE(step(tracker, /*changed=*/true).updated);
}

TEST(StepTracker, OptimizerThatStepsTwice_NextBackward_TellsOfAnIdleStep) {
  StepTracker tracker;
  step(tracker);
  tracker.optimizer_stepped(1);
  tracker.optimizer_stepped(2);  // another optimizer
  EXPECT_FALSE(step(tracker).idle_step);
  tracker.optimizer_stepped(1);
  tracker.optimizer_stepped(1);
  const StepFacts facts = step(tracker);  // its kernels bumped no version
  EXPECT_TRUE(facts.idle_step);
  EXPECT_TRUE(facts.updated);
  EXPECT_FALSE(step(tracker).updated);
}

TEST(StepTracker, BackwardWithoutAGradientOfThisRank_Step_IsNotIdle) {
  StepTracker tracker;
  step(tracker);
  for (int i = 0; i < 2; ++i) {
    tracker.optimizer_stepped(1);
    tracker.backward_began(false, false);
    EXPECT_FALSE(tracker.facts().idle_step);
  }
}

// Like libtorch's SGD: no version is bumped, and no step is reported.
TEST(StepTracker, WriteBehindTheVersions_NextBackward_TellsOfItAndHowFar) {
  StepTracker tracker;
  const at::Tensor parameter = at::zeros({4});
  step(tracker);
  EXPECT_EQ(tracker.sampled_plan(), 0);
  tracker.sample(1, {parameter});
  EXPECT_EQ(tracker.sampled_plan(), 1);
  EXPECT_FALSE(step(tracker).updated);
  parameter.variable_data().add_(0.5);
  StepFacts facts = step(tracker);
  EXPECT_TRUE(facts.updated);
  EXPECT_FALSE(facts.updated_locally);
  EXPECT_EQ(facts.moved, 2);
  facts = step(tracker);
  EXPECT_FALSE(facts.updated);
  EXPECT_EQ(facts.moved, 0);
  // Writes before and after a local gradient.
  parameter.variable_data().add_(0.5);
  tracker.gradient_arrived(/*synchronized=*/false);
  facts = step(tracker);
  EXPECT_TRUE(facts.updated);
  EXPECT_FALSE(facts.updated_locally);
  EXPECT_EQ(facts.moved, 2);
  tracker.gradient_arrived(/*synchronized=*/false);
  parameter.variable_data().add_(0.5);
  tracker.gradient_arrived(/*synchronized=*/false);
  facts = step(tracker);
  EXPECT_TRUE(facts.updated_locally);
  EXPECT_EQ(facts.moved, 2);
}

TEST(StepTracker, StepsOfAllOptimizersReported_HowFarParametersMoved_IsNoAnswer) {
  StepTracker tracker;
  const at::Tensor parameter = at::zeros({4});
  tracker.sample(1, {parameter});
  for (const bool all : {true, false}) {
    parameter.variable_data().add_(0.5);
    tracker.optimizer_stepped(1, all);
    EXPECT_EQ(step(tracker).moved, all ? 0 : 2);
  }
}

// Hazard: after join(), parameters are written on the ranks that had run out of data.
TEST(StepTracker, Forgotten_WhatIsWrittenBeforeTheNextBackward_DoesNotCount) {
  StepTracker tracker;
  const at::Tensor parameter = at::zeros({4});
  tracker.sample(1, {parameter});
  tracker.forget();
  EXPECT_EQ(tracker.sampled_plan(), 0);
  parameter.add_(1);
  EXPECT_FALSE(step(tracker, /*changed=*/true).updated);
  EXPECT_TRUE(step(tracker, /*changed=*/true).updated);
}

TEST(StepTracker, UpdateAfterALocalBackward_NextBackward_TellsOfIt) {
  StepTracker tracker;
  step(tracker);
  tracker.gradient_arrived(/*synchronized=*/false);
  EXPECT_FALSE(step(tracker).updated_locally);  // only accumulated
  tracker.gradient_arrived(/*synchronized=*/false);
  tracker.optimizer_stepped(1);
  EXPECT_TRUE(step(tracker).updated_locally);
  tracker.gradient_arrived(/*synchronized=*/false);
  tracker.backward_began(/*changed=*/true, /*touched_changed=*/true);
  EXPECT_TRUE(tracker.facts().updated_locally);  // by an optimizer that did not report
}

}  // namespace
}  // namespace apex::parallel
