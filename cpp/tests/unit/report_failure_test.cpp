// SPDX-License-Identifier: BSD-3-Clause
// Ranks are threads that share a store. Oracle: what the test makes each of them do.

#include "watch/watcher.h"

#include <support/child_process.h>
#include <support/counting_store.h>
#include <support/stored_group.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "watch/watched_group.h"

namespace apex::parallel {
namespace {

using apex::testing::ChildProcess;
using apex::testing::make_stored_groups;

using StoredGroups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

const std::string kAllReported = "; every rank has reported this failure, and none has ended";

/// The texts of report_failure() on each rank; all ranks call it at the same time.
std::vector<std::string> reports(const StoredGroups& groups,
                                 const std::vector<std::string>& collectives) {
  std::vector<std::string> texts(groups.size());
  std::vector<std::thread> ranks;
  for (size_t i = 0; i < groups.size(); ++i) {
    watched(*groups[i]);
    ranks.emplace_back([&, i] { texts[i] = report_failure(*groups[i], collectives[i]); });
  }
  for (std::thread& rank : ranks) rank.join();
  return texts;
}

TEST(ReportFailure, EveryRankReports_NobodyIsBlamed) {
  const auto groups = make_stored_groups(3, "all");
  const auto texts = reports(groups, {"a", "a", "a"});
  EXPECT_EQ(texts, std::vector<std::string>(3, kAllReported));
  for (const auto& group : groups) EXPECT_TRUE(has_failed(*group));
}

TEST(ReportFailure, RanksFailInOtherCollectives_EachIsToldWhere) {
  const auto texts = reports(make_stored_groups(2, "others"), {"a", "b"});
  EXPECT_EQ(texts[0], kAllReported + "; rank 1 failed in b");
  EXPECT_EQ(texts[1], kAllReported + "; rank 0 failed in a");
}

// Each of N ranks waits for all others; with a key per rank, every poll would take N requests.
TEST(ReportFailure, ManyRanksAreSilent_ALookTakesFewRequests) {
  constexpr int kRanks = 200;
  const auto store = c10::make_intrusive<apex::testing::CountingStore>();
  const auto groups = make_stored_groups(kRanks, "many", store);
  watched(*groups[0]);
  const int64_t before = store->requests();
  reports({groups[0]}, {"a"});
  const int64_t looks = 500 / 40 + 2;  // for half a second, with 40 ms between polls
  // Rank 0, which may host the store, polls for the ranks that were not lost: none here.
  EXPECT_LT(store->requests() - before, 2 * looks + 20);
}

TEST(ReportFailure, RanksSayNothing_AreNamed) {
  const auto texts = reports({make_stored_groups(3, "silent")[0]}, {"a"});
  EXPECT_EQ(texts[0],
            "; ranks 1, 2 have not reported this failure within 500 ms: stopped, unreachable, or "
            "did not reach this collective");
}

// With proof, no rank is waited for.
TEST(ReportFailure, ProcessOfARankHasEnded_IsNamedByWhoHadNotAskedBefore) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(3, "ended", store);
  const ChildProcess child;
  child.become_zombie();
  const std::string name = child.name().encode();
  NoticeBoard(watched(*groups[0])->key(*store, "process/" + child.name().host))
      .post(*store, "2", name);
  const auto texts = reports({groups[0], groups[1]}, {"a", "a"});
  const std::string expected =
      "; rank 2 has ended (process " + std::to_string(child.name().pid) + ")";
  EXPECT_EQ(texts, std::vector<std::string>(2, expected));
}

// Ranks of another host cannot see that a process has exited.
TEST(ReportFailure, ProofOfAnotherRank_IsPassedOn) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(3, "proof", store);
  const ChildProcess child;
  child.become_zombie();
  const WatchedGroupPtr zero = watched(*groups[0]), one = watched(*groups[1]);
  zero->processes.emplace(1, *this_process());  // prevents reading the processes
  one->processes.emplace(2, child.name());
  const auto texts = reports({groups[0], groups[1]}, {"a", "a"});
  const std::string expected =
      "; rank 2 has ended (process " + std::to_string(child.name().pid) + ")";
  EXPECT_EQ(texts, std::vector<std::string>(2, expected));
}

// A reducer's messages use a separate group; other ranks may wait in the user's group.
TEST(ReportFailure, OneRankFailsInTheGroupThatIsHeardToo_BothHaveReported) {
  const auto parents = make_stored_groups(2, "parent");
  const auto own = make_stored_groups(2, "own");
  for (size_t rank = 0; rank < 2; ++rank) watch_with(*own[rank], *parents[rank], "own");
  const auto texts = reports({own[0], parents[1]}, {"a", "b"});
  EXPECT_EQ(texts[0], kAllReported + "; rank 1 failed in b");
  EXPECT_EQ(texts[1], kAllReported + "; rank 0 failed in a");
}

TEST(ReportFailure, NothingHasFailed_SaysSo) {
  const auto groups = make_stored_groups(2, "well");
  EXPECT_FALSE(has_failed(*groups[0]));
  begin_call(*groups[0], "a");
  EXPECT_FALSE(has_failed(*groups[0]));
}

/// The posts of all ranks, by author.
RankStatuses posted(c10d::Store& store, const WatchedGroupPtr& group) {
  RankStatuses all;
  for (const auto& [author, text] : NoticeBoard(group->key(store, "status")).read(store))
    all[{std::stoi(author), author.substr(author.find(' ') + 1)}] = RankStatus::decode(text);
  return all;
}

TEST(ReportFailure, Announced_IsInTheStoreWhenItReturns) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(2, "announced", store);
  announce_failure(*groups[1], "a");
  const WatchedGroupPtr one = watched(*groups[1]);
  const RankStatuses all = posted(*store, one);
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(all.at({1, one->name}).failure->what, "a");
  EXPECT_TRUE(has_failed(*groups[1]));
}

TEST(ReportFailure, CallIsRefused_IsInTheStoreByItsNumberUntilTheRankGoesOn) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(2, "refused", store);
  begin_call(*groups[1], "a");
  refuse_call(*groups[1], "b");
  const WatchedGroupPtr one = watched(*groups[1]);
  const auto failure = [&] { return *posted(*store, one).at({1, one->name}).failure; };
  EXPECT_EQ(failure().refused, std::vector<int64_t>{2});
  EXPECT_FALSE(failure().over);
  EXPECT_FALSE(has_failed(*groups[1]));
  begin_call(*groups[1], "c");  // it continues
  one->report([](RankStatus&) {}).wait();
  EXPECT_TRUE(failure().over);
}

// A refusal does not withdraw an earlier report.
TEST(ReportFailure, RefusedAfterAFailure_HasStillFailed) {
  const auto groups = make_stored_groups(2, "refused");
  announce_failure(*groups[1], "a");
  refuse_call(*groups[1], "b");
  EXPECT_TRUE(has_failed(*groups[1]));
}

// A report about a group made from another one is over when the parent continues.
TEST(ReportFailure, ParentGoesOn_ItsReportIsOver) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto parents = make_stored_groups(2, "parent", store);
  const auto own = make_stored_groups(2, "own");
  for (size_t rank = 0; rank < 2; ++rank) watch_with(*own[rank], *parents[rank], "own");
  reports(own, {"a", "a"});
  const WatchedGroupPtr parent = watched(*parents[0]);
  const std::string name = "own";
  begin_call(*parents[0], "b");
  parent->report([](RankStatus&) {}).wait();
  const RankStatuses left = posted(*store, parent);
  EXPECT_TRUE(left.at({0, name}).failure->over);
  EXPECT_FALSE(left.at({1, name}).failure->over);
  EXPECT_EQ(store->add(parent->key(*store, "left"), 0), 1);
}

}  // namespace
}  // namespace apex::parallel
