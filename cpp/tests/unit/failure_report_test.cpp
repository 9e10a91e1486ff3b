// SPDX-License-Identifier: BSD-3-Clause
// Ranks are threads that share a store. The oracle is what the test itself lets each of them do.

#include "comm/failure_report.h"

#include <support/child_process.h>
#include <support/counting_store.h>
#include <support/stored_group.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "comm/group_record.h"

namespace apex::parallel {
namespace {

using apex::testing::ChildProcess;
using apex::testing::make_stored_groups;

using StoredGroups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

const std::string kAllReported = "; every rank has reported this failure, and none has ended";

/// What report_failure() says to each rank; all call it at once.
std::vector<std::string> reports(const StoredGroups& groups,
                                 const std::vector<std::string>& collectives) {
  std::vector<std::string> texts(groups.size());
  std::vector<std::thread> ranks;
  for (size_t i = 0; i < groups.size(); ++i) {
    record_of(*groups[i]);
    ranks.emplace_back([&, i] { texts[i] = report_failure(*groups[i], collectives[i]); });
  }
  for (std::thread& rank : ranks) rank.join();
  return texts;
}

TEST(FailureReport, EveryRankReports_NobodyIsBlamed) {
  const auto groups = make_stored_groups(3, "all");
  const auto texts = reports(groups, {"a", "a", "a"});
  EXPECT_EQ(texts, std::vector<std::string>(3, kAllReported));
  for (const auto& group : groups) EXPECT_TRUE(has_failed(*group));
}

TEST(FailureReport, RanksFailInOtherCollectives_EachIsToldWhere) {
  const auto texts = reports(make_stored_groups(2, "others"), {"a", "b"});
  EXPECT_EQ(texts[0], kAllReported + "; rank 1 failed in b");
  EXPECT_EQ(texts[1], kAllReported + "; rank 0 failed in a");
}

// Of N ranks each waits for all others; with a key for each, every look took N requests.
TEST(FailureReport, ManyRanksAreSilent_ALookTakesFewRequests) {
  constexpr int kRanks = 200;
  const auto store = c10::make_intrusive<apex::testing::CountingStore>();
  const auto groups = make_stored_groups(kRanks, "many", store);
  record_of(*groups[0]);
  const int64_t before = store->requests();
  reports({groups[0]}, {"a"});
  const int64_t looks = 500 / 40 + 2;  // in half a second, with 40 ms between two
  // Rank 0, which may keep the store, asks for each farewell of the ranks that were not lost: none.
  EXPECT_LT(store->requests() - before, 2 * looks + 20);
}

TEST(FailureReport, RanksSayNothing_AreNamed) {
  const auto texts = reports({make_stored_groups(3, "silent")[0]}, {"a"});
  EXPECT_EQ(texts[0],
            "; ranks 1, 2 have not reported this failure within 500 ms: stopped, cut off, or never "
            "came to this collective");
}

// With proof nobody is waited for.
TEST(FailureReport, ProcessOfARankHasEnded_IsNamedByWhoHadNotAskedBefore) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(3, "ended", store);
  const ChildProcess child;
  child.become_zombie();
  const std::string name = child.name().encode();
  record_of(*groups[0])->process_board(child.name().host).post(*store, 2, name);
  const auto texts = reports({groups[0], groups[1]}, {"a", "a"});
  const std::string expected =
      "; rank 2 has ended (process " + std::to_string(child.name().pid) + ")";
  EXPECT_EQ(texts, std::vector<std::string>(2, expected));
}

// Ranks of another host cannot see for themselves that a process has ended.
TEST(FailureReport, ProofOfAnotherRank_IsPassedOn) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(3, "proof", store);
  const ChildProcess child;
  child.become_zombie();
  const GroupRecordPtr zero = record_of(*groups[0]), one = record_of(*groups[1]);
  zero->processes.emplace(1, *this_process());  // so that it does not read them
  one->processes.emplace(2, child.name());
  const auto texts = reports({groups[0], groups[1]}, {"a", "a"});
  const std::string expected =
      "; rank 2 has ended (process " + std::to_string(child.name().pid) + ")";
  EXPECT_EQ(texts, std::vector<std::string>(2, expected));
}

// A reducer's messages have a group of their own; the other ranks may wait in the user's.
TEST(FailureReport, OneRankFailsInTheGroupThatIsHeardToo_BothHaveReported) {
  const auto parents = make_stored_groups(2, "parent");
  const auto own = make_stored_groups(2, "own");
  for (size_t rank = 0; rank < 2; ++rank) hear_too(*own[rank], *parents[rank]);
  const auto texts = reports({own[0], parents[1]}, {"a", "b"});
  EXPECT_EQ(texts[0], kAllReported + "; rank 1 failed in b");
  EXPECT_EQ(texts[1], kAllReported + "; rank 0 failed in a");
}

// Where a rank could not tell both groups, what it has told one of them counts.
TEST(FailureReport, OneRankHearsNoOtherGroup_ItsReportIsRead) {
  const auto parents = make_stored_groups(2, "parent");
  const auto own = make_stored_groups(2, "own");
  hear_too(*own[0], *parents[0]);
  const auto texts = reports(own, {"a", "a"});
  EXPECT_EQ(texts, std::vector<std::string>(2, kAllReported));
}

TEST(FailureReport, NothingHasFailed_SaysSo) {
  const auto groups = make_stored_groups(2, "well");
  EXPECT_FALSE(has_failed(*groups[0]));
  begin_call(*groups[0], "a");
  EXPECT_FALSE(has_failed(*groups[0]));
}

// Ranks that wait look at the count, and then for who has reported.
TEST(FailureReport, Announced_IsInTheStore) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(2, "announced", store);
  announce_failure(*groups[1], "a");
  const GroupRecordPtr one = record_of(*groups[1]);
  EXPECT_EQ(store->add(one->count_key(), 0), 1);
  EXPECT_EQ(one->report_board().read(*store), (std::map<int, std::string>{{1, "\na"}}));
  EXPECT_TRUE(has_failed(*groups[1]));
}

TEST(FailureReport, CallIsRefused_IsInTheStoreByItsNumber) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(2, "refused", store);
  begin_call(*groups[1], "a");
  refuse_call(*groups[1], "b");
  const GroupRecordPtr one = record_of(*groups[1]);
  EXPECT_TRUE(store->check({one->refusal_key(2)}));
  EXPECT_EQ(one->report_board().read(*store), (std::map<int, std::string>{{1, "\nb"}}));
  EXPECT_FALSE(has_failed(*groups[1]));
  begin_call(*groups[1], "c");  // it goes on
  EXPECT_TRUE(one->report_board().read(*store).empty());
}

// What was reported on behalf of another group is over when this one goes on.
TEST(FailureReport, GroupThatIsHeardTooGoesOn_ItsReportIsTakenBack) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto parents = make_stored_groups(2, "parent", store);
  const auto own = make_stored_groups(2, "own");
  for (size_t rank = 0; rank < 2; ++rank) hear_too(*own[rank], *parents[rank]);
  reports(own, {"a", "a"});
  const GroupRecordPtr parent = record_of(*parents[0]);
  ASSERT_EQ(parent->report_board().read(*store).count(0), 1U);
  begin_call(*parents[0], "b");
  const std::map<int, std::string> left = parent->report_board().read(*store);
  EXPECT_EQ(left.count(0), 0U);
  EXPECT_FALSE(store->check({parent->farewell_key(0)}));
  EXPECT_EQ(left.count(1), 1U);
}

}  // namespace
}  // namespace apex::parallel
