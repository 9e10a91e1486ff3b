// SPDX-License-Identifier: BSD-3-Clause
// Ranks share a store. Tests wait up to a minute for results of the store's thread.

#include "watch/watcher.h"

#include <support/child_process.h>
#include <support/counting_store.h>
#include <support/stored_group.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "watch/stall.h"
#include "watch/watched_group.h"

namespace apex::parallel {
namespace {

using apex::testing::ChildProcess;
using apex::testing::make_stored_groups;

bool comes_true(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::yield();
  }
  return true;
}

bool becomes(Wait& wait, Verdict::Kind kind) {
  return comes_true([&] { return wait.poll().kind == kind; });
}

TEST(Watcher, AnotherRankAnnounces_IsHeard) {
  const auto groups = make_stored_groups(2, "group");
  watched(*groups[0]);
  Wait wait(*groups[0]);
  EXPECT_EQ(wait.poll().kind, Verdict::kOk);
  announce_failure(*groups[1], "a");
  EXPECT_TRUE(becomes(wait, Verdict::kFailed));
}

TEST(Watcher, AnotherRankAnnouncesInTheParent_IsHeard) {
  const auto parents = make_stored_groups(2, "parent");
  const auto own = make_stored_groups(2, "own");
  watch_with(*own[0], *parents[0], "own");
  Wait wait(*own[0]);
  announce_failure(*parents[1], "a");
  EXPECT_TRUE(becomes(wait, Verdict::kFailed));
}

TEST(Watcher, AnotherRankRefusesThisCall_IsHeard) {
  const auto groups = make_stored_groups(2, "group");
  begin_call(*groups[0], "a");
  Wait wait(*groups[0]);
  refuse_call(*groups[1], "a");
  EXPECT_TRUE(becomes(wait, Verdict::kFailed));
}

// A wait makes one store call at a time, and none once it has ended.
TEST(Watcher, WaitIsOver_StoreIsNotAskedAnyMore) {
  const auto stall = stall_time();
  set_stall_time(std::chrono::milliseconds(0));  // see stall_test.cpp
  const auto store = c10::make_intrusive<apex::testing::CountingStore>();
  const auto groups = make_stored_groups(2, "group", store);
  const WatchedGroupPtr one = watched(*groups[0]);
  {
    Wait wait(*groups[0]);
    const int64_t before = store->requests();
    EXPECT_TRUE(comes_true([&] { return store->requests() >= before + 2; }));
  }
  one->report([](RankStatus&) {}).wait();  // a pending poll has completed
  const int64_t before = store->requests();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(store->requests(), before);
  set_stall_time(stall);
}

// A store answers some 30,000 requests a second, and all ranks share one store.
TEST(Watcher, ManyRanksWait_AllTogetherAskAThousandTimesASecond) {
  const auto stall = stall_time();
  set_stall_time(std::chrono::milliseconds(0));  // see stall_test.cpp
  for (const int ranks : {4, 1000, 10000}) {
    const auto store = c10::make_intrusive<apex::testing::CountingStore>();
    const auto group = make_stored_groups(ranks, "group", store)[0];
    begin_call(*group, "a");
    const WatchedGroupPtr one = watched(*group);
    const int64_t before = store->requests();
    const auto began = std::chrono::steady_clock::now();
    std::chrono::duration<double> waited{0};
    {
      Wait wait(*group);
      while ((waited = std::chrono::steady_clock::now() - began) < std::chrono::milliseconds(1200))
        EXPECT_EQ(wait.poll().kind, Verdict::kOk);
    }
    one->report([](RankStatus&) {}).wait();
    const double seconds = waited.count();
    // The first poll of a wait, and one in progress; for all ranks, afterwards.
    EXPECT_LE(static_cast<double>(store->requests() - before) - 4,
              seconds * std::min(5.0, 1000.0 / ranks))
        << ranks;
  }
  set_stall_time(stall);
}

// Ranks in different collectives wait until the timeout.
TEST(Watcher, RanksInDifferentCollectives_WhoComesSecondIsTold) {
  const auto groups = make_stored_groups(3, "group");
  for (const auto& group : groups) begin_call(*group, "a");
  begin_call(*groups[0], "b");
  begin_call(*groups[1], "b");
  begin_call(*groups[2], "c");
  Wait zero(*groups[0]), one(*groups[1]), two(*groups[2]);
  std::string text;
  EXPECT_TRUE(comes_true([&] {
    for (Wait* wait : {&zero, &one, &two}) {
      const Verdict verdict = wait->poll();
      if (verdict.kind == Verdict::kApart) text = verdict.text;
    }
    return !text.empty();
  }));
  EXPECT_NE(text.find(" is in: b"), std::string::npos) << text;
  EXPECT_NE(text.find(" is in: c"), std::string::npos) << text;
}

/// A store whose host process can be stopped.
class StoppingStore final : public c10d::HashStore {
 public:
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    stops = true;
    while (stopped) std::this_thread::yield();
    return HashStore::compareSet(key, expected, desired);
  }
  std::atomic<bool> stopped{true}, stops{false};
};

TEST(Watcher, StoreStopsWhileCallsAreCompared_HoldsNobodyUp) {
  const auto store = c10::make_intrusive<StoppingStore>();
  const auto groups = make_stored_groups(2, "group", store);
  begin_call(*groups[0], "a");
  {
    Wait wait(*groups[0]);
    EXPECT_TRUE(comes_true([&] {
      wait.poll();
      return store->stops.load();
    }));
    for (int time = 0; time < 10; ++time) EXPECT_EQ(wait.poll().kind, Verdict::kOk);
  }
  store->stopped = false;
}

TEST(Watcher, WaitThatComparedIsOver_ItsCallsAreNotLeftForTheNext) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(2, "group", store);
  begin_call(*groups[0], "a");
  const WatchedGroupPtr zero = watched(*groups[0]);
  const auto left = [&] {
    const std::string key = zero->key(*store, "calls");
    return store->check({key}) ? store->get_to_str(key) : std::string();
  };
  {
    Wait wait(*groups[0]);
    EXPECT_TRUE(comes_true([&] { return wait.poll().kind == Verdict::kOk && !left().empty(); }));
  }
  zero->report([](RankStatus&) {}).wait();
  EXPECT_EQ(left(), "");
}

// The others give up when they see it and exit as well: the first exit is the cause.
TEST(Watcher, ProcessOfARankHasEnded_IsRememberedAsTheFirst) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const auto groups = make_stored_groups(4, "group");
  const WatchedGroupPtr known = watched(*groups[0]);
  const ChildProcess gone, stopped;
  gone.become_zombie();
  stopped.stop();
  known->processes.emplace(1, *this_process());
  known->processes.emplace(2, gone.name());
  known->processes.emplace(3, stopped.name());
  Wait wait(*groups[0]);
  EXPECT_EQ(wait.poll().kind, Verdict::kOk);  // the store may still answer
  const Proof first{{2, "has ended (process " + std::to_string(gone.name().pid) + ")"}};
  EXPECT_EQ(known->ended_first, first);
}

TEST(Watcher, EveryProcessIsThere_NobodyIsRemembered) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const auto groups = make_stored_groups(2, "group");
  const WatchedGroupPtr known = watched(*groups[0]);
  known->processes.emplace(1, *this_process());
  Wait wait(*groups[0]);
  EXPECT_EQ(wait.poll().kind, Verdict::kOk);
  EXPECT_TRUE(known->ended_first.empty());
}

}  // namespace
}  // namespace apex::parallel
