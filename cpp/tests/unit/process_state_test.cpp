// SPDX-License-Identifier: BSD-3-Clause
#include "watch/process_state.h"

#include <support/child_process.h>

#include <gtest/gtest.h>

// Oracle: what the test itself does to a process.

namespace apex::parallel {
namespace {

using apex::testing::ChildProcess;

class ProcessStateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!this_process()) GTEST_SKIP() << "no /proc";
  }
};

TEST_F(ProcessStateTest, Process_RunsIsStoppedAndGoesOn_IsToldSo) {
  const ChildProcess child;
  EXPECT_EQ(state_of(child.name()), ProcessState::kUnknown);
  child.stop();
  EXPECT_EQ(state_of(child.name()), ProcessState::kStopped);
  child.go_on();
  EXPECT_EQ(state_of(child.name()), ProcessState::kUnknown);
}

TEST_F(ProcessStateTest, ProcessThatNobodyHasWaitedFor_HasEnded) {
  const ChildProcess child;
  child.become_zombie();
  EXPECT_EQ(state_of(child.name()), ProcessState::kEnded);
}

TEST_F(ProcessStateTest, ProcessThatIsGone_HasEnded) {
  ProcessName name;
  {
    const ChildProcess child;
    name = child.name();
  }
  EXPECT_EQ(state_of(name), ProcessState::kEnded);
}

TEST_F(ProcessStateTest, NumberThatIsUsedAgain_IsAnotherProcess) {
  ProcessName earlier = *this_process();
  ++earlier.start_time;
  EXPECT_EQ(state_of(earlier), ProcessState::kEnded);
}

TEST_F(ProcessStateTest, ProcessOfAnotherHost_IsNotKnown) {
  ProcessName elsewhere = *this_process();
  elsewhere.host += "x";
  elsewhere.pid = 1 << 30;
  EXPECT_EQ(state_of(elsewhere), ProcessState::kUnknown);
}

TEST_F(ProcessStateTest, Name_EncodedAndDecoded_IsTheSame) {
  const ProcessName name = *this_process();
  const auto decoded = ProcessName::decode(name.encode());
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->host, name.host);
  EXPECT_EQ(decoded->pid, name.pid);
  EXPECT_EQ(decoded->start_time, name.start_time);
  EXPECT_FALSE(ProcessName::decode("something else"));
}

}  // namespace
}  // namespace apex::parallel
