// SPDX-License-Identifier: BSD-3-Clause
// Ranks as histories that share a store.

#include "comm/call_history.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace apex::parallel {
namespace {

class CallHistoryTest : public ::testing::Test {
 protected:
  std::string compare(CallHistory& history, int rank) {
    return history.compare(*store_, "group", rank);
  }

  c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
  CallHistory zero_, one_;
};

TEST_F(CallHistoryTest, SameCalls_OneRankAhead_NothingIsDifferent) {
  for (const char* what : {"a", "b"}) {
    zero_.add(what);
    one_.add(what);
  }
  zero_.add("c");
  EXPECT_EQ(compare(zero_, 0), "");
  EXPECT_EQ(compare(one_, 1), "");
}

TEST_F(CallHistoryTest, OtherCallOfOneNumber_WhoComesSecondTellsBoth) {
  zero_.add("a");
  one_.add("a");
  zero_.add("b");
  one_.add("c");
  EXPECT_EQ(compare(zero_, 0), "");
  EXPECT_EQ(compare(one_, 1), "rank 1 is in: c, while rank 0 is in: b");
}

TEST_F(CallHistoryTest, OtherCallSomeCallsAgo_IsFound) {
  zero_.add("a");
  one_.add("b");
  for (int i = 0; i < 5; ++i) one_.add("a");
  EXPECT_EQ(compare(zero_, 0), "");
  EXPECT_EQ(compare(one_, 1), "rank 1 is in: b, while rank 0 is in: a");
}

TEST_F(CallHistoryTest, NumberOfBackwardAndNamesOfBuffers_AreNotCompared) {
  zero_.add("all-reduce of bucket 1 (4 elements), of backward number 3");
  one_.add("all-reduce of bucket 1 (4 elements), of backward number 5");
  zero_.add("broadcast of buffers ('x')");
  one_.add("broadcast of buffers ('y')");
  EXPECT_EQ(compare(zero_, 0), "");
  EXPECT_EQ(compare(one_, 1), "");
}

TEST_F(CallHistoryTest, LastNumber_CountsCallsFromOne) {
  EXPECT_EQ(zero_.last_number(), 0);
  for (int i = 1; i <= 20; ++i) {
    zero_.add("a");
    EXPECT_EQ(zero_.last_number(), i);
  }
}

TEST_F(CallHistoryTest, Forget_LeavesNothing) {
  for (int i = 0; i < 20; ++i) zero_.add("a");
  compare(zero_, 0);
  const int64_t before = store_->getNumKeys();
  EXPECT_GT(before, 0);
  zero_.forget(*store_);
  EXPECT_EQ(store_->getNumKeys(), 0);
}

}  // namespace
}  // namespace apex::parallel
