// SPDX-License-Identifier: BSD-3-Clause
// Ranks share a store. What happens on the listener's thread is awaited, up to a minute.

#include "comm/failure_listener.h"

#include <support/child_process.h>
#include <support/stored_group.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "comm/failure_report.h"
#include "comm/group_record.h"
#include "comm/hook_failure.h"

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

TEST(FailureListener, AnotherRankAnnounces_IsHeard) {
  const auto groups = make_stored_groups(2, "group");
  record_of(*groups[0]);
  const FailureListener listener(*groups[0]);
  EXPECT_FALSE(listener.heard());
  announce_failure(*groups[1], "a");
  EXPECT_TRUE(comes_true([&] { return listener.heard(); }));
}

TEST(FailureListener, AnotherRankAnnouncesInTheGroupThatIsHeardToo_IsHeard) {
  const auto parents = make_stored_groups(2, "parent");
  const auto own = make_stored_groups(2, "own");
  hear_too(*own[0], *parents[0]);
  const FailureListener listener(*own[0]);
  announce_failure(*parents[1], "a");
  EXPECT_TRUE(comes_true([&] { return listener.heard(); }));
}

TEST(FailureListener, AnotherRankRefusesThisCall_IsHeard) {
  const auto groups = make_stored_groups(2, "group");
  begin_call(*groups[0], "a");
  const FailureListener listener(*groups[0]);
  refuse_call(*groups[1], "a");
  EXPECT_TRUE(comes_true([&] { return listener.heard(); }));
}

// Each wait that takes long has a listener: threads that stayed would add up, and hold the store.
TEST(FailureListener, WaitIsOver_ThreadEndsAndLetsGoOfTheStore) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(2, "group", store);
  record_of(*groups[0]);
  const size_t before = store.use_count();
  {
    const FailureListener listener(*groups[0]);
    EXPECT_TRUE(comes_true([&] { return store.use_count() > before; }));
  }
  EXPECT_TRUE(comes_true([&] { return store.use_count() == before; }));
}

TEST(FailureListener, HasHeard_ThreadEndsAndLetsGoOfTheStore) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(2, "group", store);
  record_of(*groups[0]);
  const size_t before = store.use_count();
  const FailureListener listener(*groups[0]);
  announce_failure(*groups[1], "a");
  EXPECT_TRUE(comes_true([&] { return listener.heard(); }));
  EXPECT_TRUE(comes_true([&] { return store.use_count() == before; }));
}

// The others give up when they see it, and end, too: the first is to blame.
TEST(FailureListener, ProcessOfARankHasEnded_IsRememberedAsTheFirst) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const auto groups = make_stored_groups(4, "group");
  const GroupRecordPtr record = record_of(*groups[0]);
  const ChildProcess gone, stopped;
  gone.become_zombie();
  stopped.stop();
  record->processes.emplace(1, *this_process());
  record->processes.emplace(2, gone.name());
  record->processes.emplace(3, stopped.name());
  FailureListener listener(*groups[0]);
  EXPECT_FALSE(listener.is_left_alone());  // the store may answer yet
  const std::map<int, std::string> first{
      {2, "has ended (process " + std::to_string(gone.name().pid) + ")"}};
  EXPECT_EQ(record->ended_first, first);
}

TEST(FailureListener, EveryProcessIsThere_NobodyIsRemembered) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const auto groups = make_stored_groups(2, "group");
  const GroupRecordPtr record = record_of(*groups[0]);
  record->processes.emplace(1, *this_process());
  FailureListener listener(*groups[0]);
  EXPECT_FALSE(listener.is_left_alone());
  EXPECT_TRUE(record->ended_first.empty());
}

// A hook whose collective has begun may have failed because another rank is lost: a rank that waits
// must not take the first to report for the culprit.
TEST(HookFailure, OfOneRank_IsNamedUnlessItsCollectiveHadBegun) {
  for (const bool begun : {false, true}) {
    const auto groups = make_stored_groups(2, begun ? "begun" : "not begun");
    begin_call(*groups[0], "a");
    begin_call(*groups[0], "b");
    begin_call(*groups[1], "a");
    EXPECT_FALSE(hooks_failed_alike({groups[1]}, groups[1], "a hook", "a cause", begun));
    const GroupRecordPtr record = record_of(*groups[0]);
    const std::string named = failed_hook(*groups[0]->getStore(), *record,
                                          record->calls.last_number(), Waiting::kInCollective);
    EXPECT_EQ(named, begun ? "" : "rank 1 reports that a hook failed there: a cause");
  }
}

}  // namespace
}  // namespace apex::parallel
