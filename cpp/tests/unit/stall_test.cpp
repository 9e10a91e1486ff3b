// SPDX-License-Identifier: BSD-3-Clause
// Table tests of verdicts, and ranks as threads that share a store, some of which wait.

#include "watch/stall.h"

#include <apex/parallel/stall_report.h>
#include <support/stored_group.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "watch/record.h"
#include "watch/timing.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {
namespace {

using apex::testing::make_stored_groups;
using std::chrono::milliseconds;

RankRecord in_call(int64_t call, bool waits, const std::string& what = "a") {
  RankRecord at;
  at.channel = "group";
  at.calls["group"].number = call;
  at.call = call;
  at.what = what;
  at.waits = waits;
  at.seconds = 12.4;
  return at;
}

/// Rank 0 of 3 waits in call 7.
Stall stall() {
  Stall one;
  one.size = 3;
  one.mine = in_call(7, true);
  one.seconds_left = 20;
  return one;
}

void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << '\'' << part << "' is not in:\n" << text;
}

/// The GPU of rank 0 of 3 waits in call 7; the hosts of ranks 1 and 2 have reached these calls.
Stall on_device(int64_t of_1, int64_t of_2) {
  Stall one = stall();
  one.on_device = true;
  one.seconds_left = -1;
  one.others = {{1, in_call(of_1, false)}, {2, in_call(of_2, false)}};
  return one;
}

TEST(StallVerdict, GpuWaits_RankWhoseHostHasNotMadeTheCallIsNamed) {
  const Stall one = on_device(6, 9);
  const std::string text = describe(one);
  expect_has(text, "the GPU of rank 0 of 3 has waited for 12 s in: a");
  expect_has(text, "who:   rank 1 holds it up; rank 2 waits as well");
  EXPECT_EQ(text.find("The waiting ranks fail"), std::string::npos) << text;
}

TEST(StallVerdict, GpuWaitsAndAllHostsHaveMadeTheCall_IsNoStall) {
  EXPECT_TRUE(late(on_device(7, 9)).empty());
}

TEST(StallVerdict, GpuWaitsForRankInAnotherGroup_IsComparedInTheGroupOfTheCall) {
  Stall one = on_device(7, 7);
  one.others[2].channel = "other";
  one.others[2].call = 1;
  EXPECT_TRUE(late(one).empty());
  one.others[2].calls["group"].number = 6;
  expect_has(describe(one), "who:   rank 2 holds it up; rank 1 waits as well");
}

// In a broadcast some ranks have moved on to the next call, while others wait for rank 1 to forward
// the data.
TEST(StallVerdict, OneRankIsInNoCollective_OthersThatWaitAnywhereAreNotNamed) {
  for (const int64_t here : {6, 7}) {
    for (const char* const channel : {"group", "buffers"}) {
      Stall one = stall();
      one.size = 4;
      one.mine = in_call(here, true);
      one.others = {{1, in_call(5, false)}, {2, in_call(6, true)}, {3, in_call(7, true)}};
      one.others[2].channel = channel;
      expect_has(describe(one), "who:   rank 1 holds it up; ranks 2, 3 wait as well\n");
    }
  }
}

TEST(StallVerdict, AllWait_RanksWithTheFewestCallsAreNamed) {
  Stall one = stall();
  one.size = 4;
  one.others = {{1, in_call(7, true)}, {2, in_call(5, true)}, {3, in_call(6, true)}};
  expect_has(describe(one), "who:   rank 2 holds it up; ranks 1, 3 wait as well\n");
}

TEST(StallVerdict, RankThatIsInNoCollective_IsNamedWithWhatItDoes) {
  Stall one = stall();
  one.others[1] = in_call(7, true);
  one.others[2] = in_call(6, false, "b");
  one.others[2].state = "File \"train.py\", line 3";
  const std::string text = describe(one);
  expect_has(text, "rank 0 of 3 has waited for 12 s in: a\n");
  expect_has(text, "who:   rank 2 holds it up; rank 1 waits as well\n");
  expect_has(
      text,
      "rank 2 is in no collective of this group; its last one began 12 s before it answered: "
      "b\n      File \"train.py\"");
  expect_has(text, "its own work");
  expect_has(text, "The waiting ranks fail in 20 s");
}

TEST(StallVerdict, TwoRanksForTheSameReason_ItIsGivenOnce) {
  Stall one = stall();
  one.others = {{1, in_call(5, false)}, {2, in_call(5, false)}};
  const std::string text = describe(one);
  expect_has(text, "who:   ranks 1, 2 hold it up\n");
  EXPECT_EQ(text.find("why:"), text.rfind("why:")) << text;
}

// From an earlier stall, when it was in call 6.
TEST(StallVerdict, RanksInOtherCalls_AreNotTakenForOnesThatWaitHere) {
  Stall one = stall();
  one.others[1] = in_call(6, true);
  one.others[2] = in_call(6, true);
  one.others[2].channel = "another";
  const std::string text = describe(one);
  expect_has(text, "who:   ranks 1, 2 hold it up\n");
  expect_has(text, "at different points of the program");
  expect_has(text, "in another group");
}

TEST(StallVerdict, ProcessThatIsStopped_IsNamedWhateverItHasPosted) {
  Stall one = stall();
  one.others[1] = one.others[2] = in_call(7, true);
  one.processes[1] = "is stopped (process 5, by a signal or a debugger)";
  const std::string text = describe(one);
  expect_has(text, "who:   rank 1 holds it up; rank 2 waits as well\n");
  expect_has(text, "where: rank 1 is stopped (process 5");
  expect_has(text, "kill -CONT");
}

TEST(StallVerdict, RankThatDoesNotAnswer_IsNamed) {
  Stall one = stall();
  one.others[1] = in_call(7, true);
  expect_has(describe(one), "where: rank 2 does not answer\n");
}

// A post of an earlier stall says nothing about this one. Calls of other groups may have the same
// numbers.
TEST(StallVerdict, RankThatWaitsInAnotherGroup_IsNotTakenForOneThatWaitsHere) {
  Stall one = stall();
  one.size = 2;
  one.others[1] = in_call(7, true);
  one.others[1].channel = "another";
  const std::string text = describe(one);
  expect_has(text, "rank 1 holds it up");
  expect_has(text, "it waits for other ranks in another group");
}

TEST(StallVerdict, GroupOfSomeRanks_SaysWhichTheyAre) {
  Stall one = stall();
  one.note = "; these are ranks within the group, which consists of ranks 2, 5, 6 of the job";
  expect_has(describe(one),
             "\n  (these are ranks within the group, which consists of ranks 2, 5, 6");
}

TEST(StallVerdict, RankThatHasAnsweredBefore_DoesNotAnswer) {
  Stall one = stall();
  one.mine.asked = 5;
  one.others[1] = one.others[2] = in_call(6, false);
  one.others[1].asked = 4;
  one.others[2].asked = 5;
  const std::string text = describe(one);
  expect_has(text, "where: rank 1 does not answer\n");
  expect_has(text, "where: rank 2 is in no collective");
}

TEST(StallVerdict, AllWait_NoRankIsNamed) {
  Stall one = stall();
  one.others[1] = one.others[2] = in_call(7, true);
  expect_has(describe(one), "no rank is late");
}

TEST(StallVerdict, ManyAreLate_AFewAreDescribed) {
  Stall one = stall();
  one.size = 1000;
  const std::string text = describe(one);
  expect_has(text, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more hold it up");
  EXPECT_LT(text.size(), 1500U);
}

const std::string kName = "b";

/// With a stall time of 400 ms.
class StallTest : public ::testing::Test {
 protected:
  StallTest() : before_(stall_time()) { set_stall_time(milliseconds(400)); }
  ~StallTest() override { set_stall_time(before_); }

  /// Waits like the first `waiting` ranks of the groups, until a verdict comes or for the given
  /// time.
  static std::string verdict(const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& groups,
                             size_t waiting, std::chrono::seconds longest) {
    const std::string before = stall_report();
    std::vector<std::unique_ptr<Wait>> waits;
    for (const auto& group : groups) begin_call(*group, "a");
    for (size_t rank = 0; rank < groups.size(); ++rank) {
      if (rank >= waiting) continue;
      begin_call(*groups[rank], "b");
      waits.push_back(std::make_unique<Wait>(*groups[rank], kName));
    }
    const auto until = std::chrono::steady_clock::now() + longest;
    while (stall_report() == before && std::chrono::steady_clock::now() < until) {
      for (const auto& wait : waits) wait->poll();
      std::this_thread::sleep_for(milliseconds(5));
    }
    return stall_report() == before ? std::string() : stall_report();
  }

 private:
  const milliseconds before_;
};

TEST_F(StallTest, OneRankStaysAway_ItAloneIsNamed) {
  const auto groups = make_stored_groups(4, "away");
  const std::string text = verdict(groups, 3, std::chrono::seconds(60));
  expect_has(text, "who:   rank 3 holds it up; ranks ");
  expect_has(text, "rank 3 is in no collective of this group; its last one began ");
  expect_has(text, " before it answered: a");
}

TEST_F(StallTest, OneRankPrints_VerdictIsPartOfTheErrorOfAllThatWait) {
  static std::atomic<int> printed{0};
  on_notice([](const std::string&) { ++printed; });
  const auto groups = make_stored_groups(3, "errors");
  ASSERT_NE(verdict(groups, 2, std::chrono::seconds(60)), "");
  on_notice({});
  EXPECT_EQ(printed, 1);
  std::vector<std::string> errors(2);
  std::thread other([&] { errors[1] = report_failure(*groups[1], kName); });
  errors[0] = report_failure(*groups[0], kName);
  other.join();
  for (const std::string& error : errors) {
    expect_has(error, "; rank 2 has not reported this failure");
    expect_has(error, "\nStall report before the failure:\n");
    expect_has(error, "who:   rank 2 holds it up; rank ");
  }
}

TEST_F(StallTest, NextCallEndsTheStall_ErrorHasNoVerdict) {
  const auto groups = make_stored_groups(2, "next");
  ASSERT_NE(verdict(groups, 1, std::chrono::seconds(60)), "");
  begin_call(*groups[0], "c");
  EXPECT_EQ(report_failure(*groups[0], "c").find("Stall report"), std::string::npos);
}

// A wait that has ended gets no verdict, and its post is corrected.
TEST_F(StallTest, WaitEndsBefore_NothingIsPrinted) {
  const auto groups = make_stored_groups(2, "short");
  const std::string before = stall_report();
  begin_call(*groups[0], "a");
  {
    Wait wait(*groups[0], kName);
    const auto until = std::chrono::steady_clock::now() + milliseconds(100);
    while (std::chrono::steady_clock::now() < until) {
      wait.poll();
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_EQ(stall_report(), before);
}

// Hazard: a rank that connects gives up although no process has ended.
TEST_F(StallTest, RankThatConnects_WaitsWhileAllProcessesLive) {
  const auto groups = make_stored_groups(2, "connects");
  begin_call(*groups[0], "a");
  Wait wait(*groups[0], kName, /*connects=*/true);
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(wait.poll(), "");
    std::this_thread::sleep_for(milliseconds(5));
  }
}

/// A collective that the host does not wait for.
struct OnGpu final : c10d::Work {
  bool isCompleted() override { return completed; }
  std::atomic<bool> completed{false};
};

std::string report_within(std::chrono::seconds longest) {
  const std::string before = stall_report();
  const auto until = std::chrono::steady_clock::now() + longest;
  while (stall_report() == before && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(milliseconds(5));
  return stall_report() == before ? std::string() : stall_report();
}

TEST_F(StallTest, GpuWaitsAndTheHostOfAnotherRankHasNotMadeTheCall_IsNamed) {
  const auto groups = make_stored_groups(3, "gpu");
  for (const auto& group : groups) begin_call(*group, "first");
  for (const int rank : {0, 1}) begin_call(*groups[rank], "all-reduce of bucket 3");
  const auto work = c10::make_intrusive<OnGpu>();
  for (const int rank : {0, 1}) remember_launched(*groups[rank], "all-reduce of bucket 3", work);
  const std::string text = report_within(std::chrono::seconds(60));
  expect_has(text, "the GPU of rank 0 of 3 has waited");
  expect_has(text, "in: all-reduce of bucket 3");
  expect_has(text, "rank 2 holds it up; rank 1 waits as well");
  work->completed = true;
}

TEST_F(StallTest, GpuIsBusyAndAllHostsHaveMadeTheCall_NothingIsPrinted) {
  const auto groups = make_stored_groups(2, "busy");
  for (const auto& group : groups) begin_call(*group, "all-reduce");
  const auto work = c10::make_intrusive<OnGpu>();
  remember_launched(*groups[0], "all-reduce", work);
  EXPECT_EQ(report_within(std::chrono::seconds(2)), "");
  work->completed = true;
}

TEST_F(StallTest, Never_AsksNothing) {
  set_stall_time(milliseconds(0));
  EXPECT_EQ(verdict(make_stored_groups(2, "never"), 1, std::chrono::seconds(1)), "");
}

// --- requests of the store ---

/// Counts the requests of all ranks.
struct CountingStore final : c10d::HashStore {
  std::vector<uint8_t> get(const std::string& key) override {
    ++requests;
    return HashStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++requests;
    return HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++requests;
    return HashStore::check(keys);
  }
  std::atomic<int> requests{0};
};

// Hazard: with ranks that poll every few seconds, a store of a large job does nothing else.
TEST_F(StallTest, RanksThatTrain_AskTheStoreOnceInTenSecondsWhateverTheStallTime) {
  for (const int stall_ms : {0, 100, 10000}) {
    set_stall_time(milliseconds(stall_ms));
    constexpr int kRanks = 4, kSeconds = 2;
    const auto store = c10::make_intrusive<CountingStore>();
    const auto groups = make_stored_groups(kRanks, "trains" + std::to_string(stall_ms), store);
    for (const auto& group : groups) begin_call(*group, "first");
    std::this_thread::sleep_for(milliseconds(200));
    const int before = store->requests;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(kSeconds);
    for (int step = 0; std::chrono::steady_clock::now() < until; ++step) {
      for (const auto& group : groups) begin_call(*group, "step " + std::to_string(step));
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_LE(store->requests - before, kRanks * kSeconds / 10 + 1);
  }
}

/// Stops answering until it is released, as while its host is stopped or busy.
struct SilentStore final : c10d::HashStore {
  int64_t add(const std::string& key, int64_t value) override {
    if (answers-- <= 0) released.get_future().wait_for(std::chrono::minutes(1));
    return HashStore::add(key, value);
  }
  std::atomic<int> answers{0};
  std::promise<void> released;
};

// Hazard: the construction of a wrapper waits for a slow store, once for each of its groups.
TEST_F(StallTest, StoreDoesNotAnswer_FirstCallDoesNotWaitForIt_AndTheStallReportSaysSo) {
  const auto store = c10::make_intrusive<SilentStore>();
  const auto began = std::chrono::steady_clock::now();
  const auto groups = make_stored_groups(8, "silent", store);
  for (const auto& group : groups) begin_call(*group, "first");
  // An eighth of the groups' timeout is the shortest time for which a rank waits for a store.
  EXPECT_LT(std::chrono::steady_clock::now() - began, 4 * timing::kLeastPatience);
  const std::string text = verdict({groups[5]}, 1, std::chrono::seconds(60));
  expect_has(report_failure(*groups[6], "first"), "does not answer");
  store->released.set_value();
  expect_has(text, "rank 5 of 8 has waited for ");
  expect_has(text, "the store, through which ranks report, does not answer");
}

// Hazard: its last answer came after the wait had begun.
TEST_F(StallTest, StoreFallsSilentDuringAWait_TheStallReportSaysSo) {
  set_stall_time(milliseconds(2000));  // the rank looks for reports before it asks
  const auto store = c10::make_intrusive<SilentStore>();
  store->answers = 10;  // to the introduction of each rank, and to two looks
  const auto groups = make_stored_groups(8, "falls silent", store);
  const std::string text = verdict({groups[5]}, 1, std::chrono::seconds(20));
  store->released.set_value();
  expect_has(text, "the store, through which ranks report, does not answer");
}

// One request each time; see Board::read_news().
TEST(StallTimes, RanksThatTrainOrWait_AskAtMostAThousandTimesASecond) {
  constexpr int kRanks = 10000;
  EXPECT_GE(timing::kIdle, std::chrono::seconds(10));
  EXPECT_LE(kRanks * 1000 / timing::kIdle.count(), 1000);
  EXPECT_LE(kRanks * 1000 / timing::between_looks(kRanks).count(), 1000);
}

}  // namespace
}  // namespace apex::parallel
