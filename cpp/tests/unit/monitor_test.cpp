// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "reducer/monitor.h"
#include "reducer/phase.h"

namespace apex::parallel::detail {
namespace {

TEST(Monitor, Opened_OtherThreads_ReadButDoNotChange) {
  Monitor monitor;
  int value = 0;
  std::promise<void> changing;
  std::thread other;
  {
    const Monitor::Change change(monitor);
    value = 1;
    monitor.open([&] {
      EXPECT_EQ(std::async(std::launch::async,
                           [&] {
                             const Monitor::Read read(monitor);
                             EXPECT_TRUE(monitor.is_taken());
                             return value;
                           })
                    .get(),
                1);
      other = std::thread([&] {
        changing.set_value();
        const Monitor::Change later(monitor);
        EXPECT_EQ(value, 2);
        value = 3;
      });
      changing.get_future().wait();
    });
    value = 2;  // before the other thread runs
  }
  other.join();
  EXPECT_EQ(value, 3);
}

TEST(Monitor, UserCodeOfTheSameThread_ComesBack_ReadsAndChanges) {
  Monitor monitor;
  int value = 0;
  const Monitor::Change change(monitor);
  monitor.open([&] {
    {
      const Monitor::Read read(monitor);
    }
    {
      const Monitor::Change again(monitor);
      monitor.open([&] {
        const Monitor::Change third(monitor);
        ++value;
      });
      const Monitor::Read read(monitor);
      ++value;
    }
    // Open again, so another thread may read.
    EXPECT_EQ(std::async(std::launch::async,
                         [&] {
                           const Monitor::Read read(monitor);
                           return value;
                         })
                  .get(),
              2);
  });
  EXPECT_THROW(monitor.open([] { throw 1; }), int);
  const Monitor::Read read(monitor);
  EXPECT_EQ(value, 2);
}

TEST(Monitor, ManyThreads_Change_OneAtATime) {
  Monitor monitor;
  int value = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const Monitor::Change change(monitor);
        const int before = value;
        monitor.open([] { std::this_thread::yield(); });
        value = before + 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(value, 2000);
}

TEST(Phase, Released_AnyOther_NeverFollows) {
  for (const Phase to :
       {Phase::kIdle, Phase::kRunning, Phase::kEnding, Phase::kDeferred, Phase::kFailed}) {
    EXPECT_FALSE(may_follow(Phase::kReleased, to));
  }
  EXPECT_FALSE(may_follow(Phase::kFailed, Phase::kIdle));
  EXPECT_FALSE(may_follow(Phase::kIdle, Phase::kEnding));
  EXPECT_TRUE(may_follow(Phase::kEnding, Phase::kDeferred));
}

}  // namespace
}  // namespace apex::parallel::detail
