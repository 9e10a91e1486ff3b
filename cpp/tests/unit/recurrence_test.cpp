// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <vector>

#include "reducer/recurrence.h"

namespace apex::parallel {
namespace {

/// How many of these it does not foretell.
int misses(Recurrence& recurrence, const std::vector<size_t>& things) {
  int missed = 0;
  for (const size_t thing : things) {
    missed += recurrence.next() != thing;
    recurrence.came(thing);
  }
  return missed;
}

TEST(Recurrence, OneThing_IsExpectedAgain) {
  Recurrence recurrence;
  EXPECT_FALSE(recurrence.next().has_value());
  recurrence.came(3);
  EXPECT_EQ(misses(recurrence, {3, 3, 3, 3}), 0);
}

TEST(Recurrence, PeriodOfAnyRunLengths_AfterOnePeriod_IsForetold) {
  for (const std::vector<size_t>& period : std::vector<std::vector<size_t>>{
           {0, 1}, {0, 0, 1}, {0, 0, 0, 0, 0, 1}, {0, 0, 1, 1, 1, 2}, {2, 0, 0, 1}}) {
    Recurrence recurrence;
    misses(recurrence, period);
    misses(recurrence, period);
    for (int again = 0; again < 3; ++again) EXPECT_EQ(misses(recurrence, period), 0);
  }
}

TEST(Recurrence, ChangeOfRhythm_IsMissedOncePerChange) {
  Recurrence recurrence;
  misses(recurrence, {0, 1, 0, 1, 0, 1});
  EXPECT_LE(misses(recurrence, {0, 0, 1, 0, 0, 1, 0, 0, 1}), 2);
  EXPECT_LE(misses(recurrence, {0, 0, 0, 0, 0, 0, 0, 0}), 1);
  recurrence.forget();
  EXPECT_FALSE(recurrence.next().has_value());
}

}  // namespace
}  // namespace apex::parallel
