// SPDX-License-Identifier: BSD-3-Clause
// Uses a backend that behaves like NCCL: the host does not wait, and abort() lets its stream
// continue.

#include "watch/followed_work.h"

#include <apex/parallel/stall_report.h>
#include <support/child_process.h>
#include <support/stored_group.h>
#include <support/stream_mark.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "watch/stall.h"
#include "watch/timing.h"
#include "watch/watched_group.h"
#include "watch/watcher.h"

namespace apex::parallel {
namespace {

using apex::testing::ChildProcess;
using apex::testing::make_stored_groups;
using apex::testing::SilentBackend;

/// A stream: how much work it was given, and how much it has completed.
struct Stream {
  std::atomic<int> given{0}, done{0};
  std::atomic<bool> aborted{false}, capturing{false}, is_full{false};
  std::atomic<bool> set_throws{false}, query_throws{false};
  std::atomic<int> marks{0};               ///< number of live marks
  std::function<void()> on_abort = [] {};  ///< called by abort()
};

class Mark final : public distributed::StreamMark {
 public:
  explicit Mark(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) { ++stream_->marks; }
  ~Mark() override { --stream_->marks; }
  bool set() override {
    if (stream_->set_throws) throw std::runtime_error("no memory");
    if (stream_->capturing) return false;
    while (stream_->is_full && !stream_->aborted) std::this_thread::yield();
    at_ = stream_->given.load();
    return true;
  }
  bool reached() override {
    if (stream_->query_throws) throw std::runtime_error("no memory");
    return stream_->aborted || stream_->done >= at_;
  }

 private:
  const std::shared_ptr<Stream> stream_;
  int at_ = 0;
};

class LikeNccl final : public SilentBackend {
 public:
  LikeNccl(int rank, int size, std::shared_ptr<Stream> stream)
      : SilentBackend(rank, size), stream_(std::move(stream)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void abort() override {
    stream_->on_abort();
    stream_->aborted = true;
  }

 private:
  const std::shared_ptr<Stream> stream_;
};

/// A store whose host process can be stopped.
class BlockingStore final : public c10d::HashStore {
 public:
  int64_t add(const std::string& key, int64_t value) override {
    while (stopped) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return HashStore::add(key, value);
  }
  std::atomic<bool> stopped{false};
};

/// Rank 1 of three. Rank 0 would wait until the others have read its report.
class FollowedWork : public ::testing::Test {
 protected:
  FollowedWork() : groups_(make_stored_groups(3, "group", store_)) {
    groups_[1]->setBackend(
        c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL,
        c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<LikeNccl>(1, 3, stream_)));
    groups_[1]->setGroupName("group");  // also of that backend
    apex::testing::stream_marks = [stream = stream_] { return std::make_unique<Mark>(stream); };
    for (const auto& group : groups_) begin_call(*group, "first");
    known_ = watched(*groups_[1]);
    known_->processes.emplace(0, *this_process());
    known_->processes.emplace(2, child_.name());
  }
  ~FollowedWork() override {
    store_->stopped = false;
    stream_->aborted = true;  // remaining work ends
    apex::testing::stream_marks = nullptr;
  }

  void launch(const std::string& what = "all-reduce") {
    begin_call(*groups_[1], what);
    ++stream_->given;
    follow_work(*groups_[1], what);
  }
  bool is_followed() {
    const std::lock_guard<std::mutex> lock(known_->mutex);
    return known_->launched.followed;
  }
  static bool comes_true(const std::function<bool()>& condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!condition()) {
      if (std::chrono::steady_clock::now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return true;
  }
  bool is_aborted_soon() {
    return comes_true([this] { return stream_->aborted.load(); });
  }
  /// Waits longer than any abort takes.
  bool stays_whole() {
    const auto until = std::chrono::steady_clock::now() + timing::kUnfinished + timing::kAlone +
                       3 * timing::kNeighbours;
    while (std::chrono::steady_clock::now() < until) {
      if (stream_->aborted) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return true;
  }

  std::shared_ptr<Stream> stream_ = std::make_shared<Stream>();
  const c10::intrusive_ptr<BlockingStore> store_ = c10::make_intrusive<BlockingStore>();
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
  ChildProcess child_;
  WatchedGroupPtr known_;
};

TEST_F(FollowedWork, AnotherProcessEnds_CommunicatorIsAbortedAndTheRankIsNamed) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  ::testing::internal::CaptureStderr();
  launch();
  child_.become_zombie();
  EXPECT_TRUE(is_aborted_soon());
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("rank 1 of 3: all-reduce does not complete; rank 2 has ended (process " +
                      std::to_string(child_.name().pid) + ")"),
            std::string::npos)
      << said;
  // The text that the group's next collective adds to its error.
  EXPECT_NE(report_failure(*groups_[1], "all-reduce").find("rank 2 has ended"), std::string::npos);
}

TEST_F(FollowedWork, AnotherProcessEndsWhileTheStoreDoesNotAnswer_CommunicatorIsAborted) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  store_->stopped = true;
  launch();
  child_.become_zombie();
  EXPECT_TRUE(is_aborted_soon());
  EXPECT_NE(report_failure(*groups_[1], "all-reduce").find("rank 2 has ended"), std::string::npos);
}

TEST_F(FollowedWork, StoreDoesNotAnswerAndAllProcessesRun_NothingIsAborted) {
  store_->stopped = true;
  launch();
  EXPECT_TRUE(stays_whole());
  ++stream_->done;
  EXPECT_TRUE(comes_true([this] { return !is_followed(); }));
}

TEST_F(FollowedWork, AnotherRankReportsAFailure_CommunicatorIsAborted) {
  launch();
  announce_failure(*groups_[0], "all-reduce");
  EXPECT_TRUE(is_aborted_soon());
}

// The host has continued to later calls, while the GPU waits in the call that was refused.
TEST_F(FollowedWork, AnotherRankRefusedAnEarlierCall_CommunicatorIsAborted) {
  launch("second");
  refuse_call(*groups_[0], "second");
  launch("third");
  EXPECT_TRUE(is_aborted_soon());
}

// All ranks have thrown and continued: no rank waits in that call.
TEST_F(FollowedWork, AllRanksRefusedAnEarlierCall_NothingIsAborted) {
  for (const auto& group : groups_) refuse_call(*group, "second");
  launch("third");
  EXPECT_TRUE(stays_whole());
  EXPECT_EQ(known_->status.failure->what, "second");  // and is not reported as failed yet
  EXPECT_FALSE(has_failed(*groups_[1]));
}

// This rank's host has reached the call; its GPU is busy with an earlier one and makes progress.
TEST_F(FollowedWork, GpuIsBusyBeforeACallThatAnotherRankRefused_IsAbortedWhenItComesThere) {
  launch("second");
  begin_call(*groups_[0], "second");
  refuse_call(*groups_[0], "third");
  launch("third");
  EXPECT_TRUE(stays_whole());
  EXPECT_FALSE(has_failed(*groups_[1]));
  ++stream_->done;
  EXPECT_TRUE(is_aborted_soon());
}

TEST_F(FollowedWork, AnotherRankRefusesALaterCall_NothingIsAborted) {
  launch("second");
  begin_call(*groups_[0], "second");
  refuse_call(*groups_[0], "third");
  EXPECT_TRUE(stays_whole());  // the GPU may be busy with other work
  EXPECT_TRUE(is_followed());
}

// A rank may exit after its last collective while other ranks' GPUs still work on it.
TEST_F(FollowedWork, GpuComesThereAfterAnotherProcessEnded_NothingIsAborted) {
  launch();
  child_.become_zombie();
  std::this_thread::sleep_for(timing::kUnfinished + 2 * timing::kNeighbours);
  ++stream_->done;
  EXPECT_TRUE(stays_whole());
  EXPECT_FALSE(is_followed());
}

TEST_F(FollowedWork, GpuHasFinished_IsNotFollowedUntilTheNextLaunch) {
  launch();
  ++stream_->done;
  EXPECT_TRUE(comes_true([this] { return !is_followed(); }));
  launch();
  EXPECT_TRUE(is_followed());
  child_.become_zombie();
  EXPECT_TRUE(is_aborted_soon());
}

// The host has launched everything at once. Every completion counts, not only the last.
TEST_F(FollowedWork, QueueIsFinishedOneByOneAfterAnotherProcessEnded_NothingIsAborted) {
  child_.become_zombie();
  for (int i = 0; i < 200; ++i) launch();
  const auto until = std::chrono::steady_clock::now() + 2 * timing::kUnfinished + timing::kAlone +
                     5 * timing::kNeighbours;
  while (std::chrono::steady_clock::now() < until) {
    ++stream_->done;
    std::this_thread::sleep_for(timing::kUnfinished / 20);
  }
  EXPECT_FALSE(stream_->aborted);
  EXPECT_TRUE(is_followed());
  EXPECT_TRUE(is_aborted_soon());  // it stops here
}

// The GPU is busy all the time, and the latest launch never completes.
TEST_F(FollowedWork, HostIsAlwaysAhead_NothingIsAborted) {
  child_.become_zombie();  // otherwise a reason to abort
  const auto until = std::chrono::steady_clock::now() + timing::kUnfinished + 2 * timing::kAlone;
  while (std::chrono::steady_clock::now() < until) {
    launch();
    stream_->done = stream_->given - 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_FALSE(stream_->aborted);
}

// A stream has a limited queue; when it is full, the host waits inside the call.
TEST_F(FollowedWork, HostWaitsForRoomInTheStream_CommunicatorIsAborted) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  launch();
  stream_->is_full = true;
  std::thread host([this] { launch(); });
  child_.become_zombie();
  EXPECT_TRUE(is_aborted_soon());
  host.join();
}

/// Collects notices, with a stall time of 400 ms.
class Said {
 public:
  Said() : before_(stall_time()) {
    set_stall_time(std::chrono::milliseconds(400));
    on_notice([this](const std::string& text) {
      const std::lock_guard<std::mutex> lock(mutex_);
      texts_.push_back(text);
    });
  }
  ~Said() {
    on_notice({});
    set_stall_time(before_);
  }
  std::vector<std::string> texts() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return texts_;
  }

 private:
  const std::chrono::milliseconds before_;
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

TEST_F(FollowedWork, HostOfAnotherRankHasNotMadeTheCall_IsNamedOnceAndNothingIsAborted) {
  Said said;
  begin_call(*groups_[0], "all-reduce");
  launch("all-reduce of bucket 3");
  begin_call(*groups_[1], "the next one");  // the host is ahead
  ASSERT_TRUE(comes_true([&] { return !said.texts().empty(); }));
  EXPECT_TRUE(stays_whole());
  ASSERT_EQ(said.texts().size(), 1U);
  const std::string text = said.texts().front();
  EXPECT_NE(text.find("the GPU of rank 1 of 3 has waited"), std::string::npos) << text;
  EXPECT_NE(text.find("in: all-reduce of bucket 3"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 2 holds it up; rank 0 waits as well"), std::string::npos) << text;
}

TEST_F(FollowedWork, GpuIsBusyAndAllHostsHaveMadeTheCall_NothingIsSaid) {
  Said said;
  for (const int rank : {0, 2}) begin_call(*groups_[rank], "all-reduce");
  launch();
  EXPECT_TRUE(stays_whole());
  EXPECT_TRUE(said.texts().empty()) << said.texts().front();
}

TEST_F(FollowedWork, GraphIsCaptured_NothingIsFollowed) {
  stream_->capturing = true;
  launch();
  EXPECT_FALSE(is_followed());
}

TEST_F(FollowedWork, NoMarks_NothingIsFollowed) {
  apex::testing::stream_marks = nullptr;
  launch();
  EXPECT_FALSE(is_followed());
}

TEST_F(FollowedWork, MarkCannotBeSet_TheNextCallIsFollowed) {
  stream_->set_throws = true;
  launch();
  EXPECT_FALSE(is_followed());
  stream_->set_throws = false;
  launch();
  EXPECT_TRUE(is_followed());
}

TEST_F(FollowedWork, MarkCannotBeAsked_TheNextCallIsFollowed) {
  stream_->query_throws = true;
  launch();
  EXPECT_TRUE(comes_true([this] { return !is_followed(); }));
  stream_->query_throws = false;
  launch();
  EXPECT_TRUE(is_followed());
}

TEST_F(FollowedWork, ThousandsOfCallsInFlight_FewMarksAreKeptTheLastAmongThem) {
  for (int i = 0; i < 5000; ++i) launch("all-reduce " + std::to_string(i));
  EXPECT_LE(stream_->marks, 2 * static_cast<int>(Launched::kMarks) + 1);
  const std::lock_guard<std::mutex> lock(known_->mutex);
  EXPECT_LE(known_->launched.calls.size(), Launched::kMarks);
  ASSERT_FALSE(known_->launched.calls.empty());
  EXPECT_EQ(known_->launched.calls.back().what, "all-reduce 4999");
}

TEST_F(FollowedWork, SeveralThreadsLaunch_FewMarksAreKept) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this] {
      for (int call = 0; call < 500; ++call) launch();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(is_followed());
  EXPECT_LE(stream_->marks, 2 * static_cast<int>(Launched::kMarks) + 4);
}

// Over NCCL a collective may return before other ranks have published their processes.
TEST_F(FollowedWork, ProcessesAreNotKnownYet_AreReadBeforeTheyAreLookedAt) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  known_->processes.clear();
  known_->store
      ->post([this](c10d::Store& store) {
        NoticeBoard(known_->key(store, "process/" + this_process()->host))
            .post(store, "2", child_.name().encode());
      })
      .wait();
  launch();
  child_.become_zombie();
  EXPECT_TRUE(is_aborted_soon());
  EXPECT_NE(report_failure(*groups_[1], "all-reduce").find("rank 2 has ended"), std::string::npos);
}

TEST_F(FollowedWork, AbortThrowsWhatIsNoException_IsSaid) {
  Said said;
  stream_->on_abort = [] { throw 42; };
  launch();
  for (const int rank : {0, 2}) announce_failure(*groups_[rank], "all-reduce");
  ASSERT_TRUE(comes_true([&] { return said.texts().size() == 2; }));
  EXPECT_NE(said.texts()[0].find("all-reduce does not complete"), std::string::npos);
  EXPECT_EQ(said.texts()[1], "the communicator could not be aborted: unknown error");
}

TEST_F(FollowedWork, GroupIsGone_IsNotFollowedAnyMore) {
  launch();
  const std::weak_ptr<WatchedGroup> weak = known_;
  known_.reset();
  groups_.clear();
  EXPECT_TRUE(comes_true([&] {
    watched(*make_stored_groups(2, "other")[0]);  // it removes expired groups
    return weak.expired();
  }));
}

}  // namespace
}  // namespace apex::parallel
