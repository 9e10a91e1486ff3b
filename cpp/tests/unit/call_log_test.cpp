// SPDX-License-Identifier: BSD-3-Clause
// Ranks are represented by their logs.

#include "watch/call_log.h"

#include <gtest/gtest.h>

namespace apex::parallel {
namespace {

class CallLogTest : public ::testing::Test {
 protected:
  /// The difference as seen by rank 1.
  std::string difference() { return one_.difference(1, zero_.encode(0)); }

  CallLog zero_, one_;
};

TEST_F(CallLogTest, SameCalls_OneRankAhead_NothingIsDifferent) {
  EXPECT_EQ(difference(), "");
  for (const char* what : {"a", "b\nb"}) {
    zero_.add(what);
    one_.add(what);
  }
  zero_.add("c");
  EXPECT_EQ(difference(), "");
  EXPECT_EQ(zero_.difference(0, one_.encode(1)), "");
  EXPECT_TRUE(zero_.goes_further_than(one_.encode(1)));
  EXPECT_FALSE(one_.goes_further_than(zero_.encode(0)));
  EXPECT_FALSE(one_.goes_further_than(one_.encode(1)));
}

TEST_F(CallLogTest, OtherCallOfOneNumber_BothAreTold) {
  for (CallLog* log : {&zero_, &one_}) log->add("a");
  zero_.add("b");
  one_.add("c");
  EXPECT_EQ(difference(), "rank 1 is in: c, while rank 0 is in: b");
  EXPECT_EQ(zero_.difference(0, one_.encode(1)), "rank 0 is in: b, while rank 1 is in: c");
}

TEST_F(CallLogTest, OtherCallSomeCallsAgo_IsFound) {
  zero_.add("a");
  one_.add("b");
  for (int i = 0; i < 5; ++i) one_.add("a");
  EXPECT_EQ(difference(), "rank 1 is in: b, while rank 0 is in: a");
}

TEST_F(CallLogTest, NoCallInCommonAnyMore_NothingIsKnown) {
  zero_.add("a");
  for (int i = 0; i < 9; ++i) one_.add("b");
  EXPECT_EQ(difference(), "");
}

TEST_F(CallLogTest, NumberOfBackwardAndNamesOfBuffers_AreNotCompared) {
  zero_.add("all-reduce of bucket 1 (4 elements), of backward number 3");
  one_.add("all-reduce of bucket 1 (4 elements), of backward number 5");
  zero_.add("broadcast of buffers ('x')");
  one_.add("broadcast of buffers ('y')");
  EXPECT_EQ(difference(), "");
}

// A rank that refuses a call skips its number.
TEST_F(CallLogTest, NumberThatWasPassedOver_IsNotCompared) {
  zero_.add("a");
  one_.add({});
  for (CallLog* log : {&zero_, &one_}) log->add("b");
  EXPECT_EQ(difference(), "");
  EXPECT_EQ(zero_.difference(0, one_.encode(1)), "");
  EXPECT_EQ(one_.last_number(), 2);
}

TEST_F(CallLogTest, LastNumber_CountsCallsFromOne) {
  EXPECT_EQ(zero_.last_number(), 0);
  for (int i = 1; i <= 20; ++i) {
    zero_.add("a");
    EXPECT_EQ(zero_.last_number(), i);
  }
}

}  // namespace
}  // namespace apex::parallel
