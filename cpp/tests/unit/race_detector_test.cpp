// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <support/race_detector.h>

namespace apex::testing {
namespace {

using Access = RaceDetector::Access;
using Block = RaceDetector::Block;
using Stream = RaceDetector::Stream;

class RaceDetectorTest : public ::testing::Test {
 protected:
  void write(Stream stream, Block block, size_t begin = 0, size_t end = 8) {
    detector_.operate(stream, "write", {{block, begin, end, true}});
  }
  void read(Stream stream, Block block, size_t begin = 0, size_t end = 8) {
    detector_.operate(stream, "read", {{block, begin, end, false}});
  }
  void order(Stream earlier, Stream later) { detector_.wait(later, detector_.record(earlier)); }
  size_t found() const { return detector_.errors().size(); }

  RaceDetector detector_;
  const Stream a_ = detector_.new_stream("a");
  const Stream b_ = detector_.new_stream("b");
  const Stream c_ = detector_.new_stream("c");
};

TEST_F(RaceDetectorTest, ReadOfAnotherStreamsWrite_IsARaceUnlessItWaits) {
  const Block block = detector_.allocate(a_);
  write(a_, block);
  order(a_, c_);
  read(c_, block);
  EXPECT_EQ(found(), 0);
  read(b_, block);
  ASSERT_EQ(found(), 1);
  EXPECT_EQ(detector_.errors()[0],
            "read on stream 'b' reads what write on stream 'a' writes, without waiting for it");
}

TEST_F(RaceDetectorTest, WriteOverAnotherStreamsRead_IsARaceUnlessItWaits) {
  const Block block = detector_.allocate(a_);
  read(b_, block);
  read(c_, block);
  order(b_, a_);
  write(a_, block);
  EXPECT_EQ(found(), 1);  // the read of c
  order(c_, a_);
  write(a_, block);
  EXPECT_EQ(found(), 1);
}

TEST_F(RaceDetectorTest, ReadsOfSeveralStreams_AreNoRace) {
  const Block block = detector_.allocate(a_);
  read(a_, block);
  read(b_, block);
  EXPECT_EQ(found(), 0);
}

TEST_F(RaceDetectorTest, BytesThatDoNotOverlap_AreNoRace) {
  const Block block = detector_.allocate(a_);
  write(a_, block, 0, 8);
  write(b_, block, 8, 16);
  EXPECT_EQ(found(), 0);
  write(b_, block, 7, 9);
  EXPECT_EQ(found(), 1);
}

TEST_F(RaceDetectorTest, Order_IsTransitive) {
  const Block block = detector_.allocate(a_);
  write(a_, block);
  order(a_, b_);
  order(b_, c_);
  write(c_, block);
  EXPECT_EQ(found(), 0);
}

TEST_F(RaceDetectorTest, EventRecordedTooEarly_DoesNotOrder) {
  const Block block = detector_.allocate(a_);
  const auto early = detector_.record(a_);
  write(a_, block);
  detector_.wait(b_, early);
  write(b_, block);
  EXPECT_EQ(found(), 1);
}

TEST_F(RaceDetectorTest, HostThatWaits_OrdersWhatItAsksForNext) {
  const Block block = detector_.allocate(a_);
  write(a_, block);
  const auto done = detector_.record(a_);
  EXPECT_FALSE(detector_.host_knows(done));
  detector_.host_waits(done, "item");
  EXPECT_TRUE(detector_.host_knows(done));
  write(b_, block);
  EXPECT_EQ(found(), 0);
  EXPECT_EQ(detector_.host_waits(), std::vector<std::string>{"item"});
}

TEST_F(RaceDetectorTest, MemoryFreedWhileAnotherStreamUsesIt_MustNotBeReused) {
  const Block old = detector_.allocate(a_);
  write(a_, old);
  order(a_, b_);
  read(b_, old);
  detector_.free(old);
  const Block young = detector_.allocate(a_);
  read(a_, young);
  EXPECT_EQ(found(), 0);
  write(a_, young);
  ASSERT_EQ(found(), 1);
  EXPECT_NE(detector_.errors()[0].find("record_stream() is missing"), std::string::npos);
}

TEST_F(RaceDetectorTest, MemoryFreedWhileAnotherStreamUsesIt_WithUseToldIsKept) {
  const Block old = detector_.allocate(a_);
  read(b_, old);
  detector_.used_on(old, b_);
  detector_.free(old);
  write(a_, detector_.allocate(a_));
  EXPECT_EQ(found(), 0);
  EXPECT_EQ(detector_.uses_told(), 1);
}

TEST_F(RaceDetectorTest, MemoryFreedWhileAnotherStreamUsesIt_IsKeptByWhoWaitedForThat) {
  const Block old = detector_.allocate(a_);
  read(b_, old);
  order(b_, c_);
  detector_.used_on(old, c_);
  detector_.free(old);
  write(a_, detector_.allocate(a_));
  EXPECT_EQ(found(), 0);
}

TEST_F(RaceDetectorTest, MemoryFreedWhileAnotherStreamUsesIt_IsNotKeptByAThird) {
  const Block old = detector_.allocate(a_);
  read(b_, old);
  detector_.used_on(old, c_);
  detector_.free(old);
  write(a_, detector_.allocate(a_));
  EXPECT_EQ(found(), 1);
}

TEST_F(RaceDetectorTest, MemoryFreedWhileAnotherStreamUsesIt_MayBeReusedAfterWaiting) {
  const Block old = detector_.allocate(a_);
  read(b_, old);
  detector_.free(old);
  const Block young = detector_.allocate(a_);
  order(b_, a_);
  write(a_, young);
  EXPECT_EQ(found(), 0);
}

TEST_F(RaceDetectorTest, MemoryThatIsOlderThanTheFree_IsNotReused) {
  const Block other = detector_.allocate(a_);
  const Block old = detector_.allocate(a_);
  read(b_, old);
  detector_.free(old);
  write(a_, other);
  write(c_, detector_.allocate(c_));  // from another stream's pool
  EXPECT_EQ(found(), 0);
}

TEST_F(RaceDetectorTest, Reset_ForgetsAndOrdersEverything) {
  const Block block = detector_.allocate(a_);
  write(a_, block);
  write(b_, block);
  EXPECT_EQ(found(), 1);
  detector_.reset();
  EXPECT_EQ(found(), 0);
  write(c_, block);
  EXPECT_EQ(found(), 0);
  EXPECT_EQ(detector_.operations(), 1);
}

}  // namespace
}  // namespace apex::testing
