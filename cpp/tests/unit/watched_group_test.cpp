// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watched_group.h"

#include <support/stored_group.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "distributed/backends.h"

namespace apex::distributed {

// The library's version queries Gloo, which is not compiled into this program.
std::optional<std::chrono::milliseconds> gloo_timeout(c10d::Backend& backend) {
  auto* const silent = dynamic_cast<testing::SilentBackend*>(&backend);
  return silent == nullptr ? std::nullopt : std::optional(silent->timeout());
}

std::vector<uint64_t> gloo_global_ranks(c10d::Backend& backend) {
  auto* const silent = dynamic_cast<testing::SilentBackend*>(&backend);
  return silent == nullptr ? std::vector<uint64_t>() : silent->global_ranks;
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest&) { return nullptr; }
c10::intrusive_ptr<c10d::Backend> make_gloo_backend_like(const c10::intrusive_ptr<c10d::Backend>&,
                                                         const c10::intrusive_ptr<c10d::Store>&,
                                                         int, int) {
  return nullptr;
}

bool is_capturing() { return false; }
bool has_completed(c10d::Work& work) { return work.isCompleted(); }

}  // namespace apex::distributed

namespace apex::parallel {
namespace {

using apex::testing::make_stored_groups;

TEST(WatchedGroup, FirstAskedFor_TellsTheOthersWhichProcessThisIs) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(2, "told", store);
  const WatchedGroupPtr one = watched(*groups[1]);
  ASSERT_TRUE(one);
  EXPECT_EQ(one->rank, 1);
  EXPECT_EQ(one->size, 2);
  const std::map<std::string, std::string> told{{"1", this_process()->encode()}};
  EXPECT_EQ(NoticeBoard(one->key(*store, "process/" + this_process()->host)).read(*store), told);
  EXPECT_EQ(watched(*groups[1]), one);
  EXPECT_EQ(find_watched(*groups[1]), one);
  EXPECT_EQ(find_watched(*groups[0]), nullptr);
}

/// A store whose first call that publishes a rank fails: add(), or append().
struct FailsOnce final : c10d::HashStore {
  explicit FailsOnce(bool adds) : adds_(adds) {}
  int64_t add(const std::string& key, int64_t value) override {
    if (adds_ && key.find("introduced") != std::string::npos && !std::exchange(failed_, true))
      throw std::runtime_error("the connection is lost");
    return HashStore::add(key, value);
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    if (!adds_ && !std::exchange(failed_, true)) throw std::runtime_error("the connection is lost");
    HashStore::append(key, value);
  }

 private:
  const bool adds_;
  bool failed_ = false;
};

// Hazard: from then on the rank reads and writes under other keys than its peers, or they do not
// know its process.
TEST(WatchedGroup, StoreIsLostInTheFirstCall_TheNextCompletesIt) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  for (const bool adds : {true, false}) {
    const StorePtr store = c10::make_intrusive<FailsOnce>(adds);
    const auto groups = make_stored_groups(2, "lost", store);
    const WatchedGroupPtr zero = watched(*groups[0]), one = watched(*groups[1]);
    EXPECT_EQ(zero->key(*store, "status"), one->key(*store, "status"));
    EXPECT_EQ(NoticeBoard(one->key(*store, "process/" + this_process()->host)).read(*store).size(),
              2U);
  }
}

TEST(WatchedGroup, OneRank_HasNobodyToTell) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(watched(*make_stored_groups(1, "alone", store)[0]), nullptr);
  EXPECT_EQ(store->getNumKeys(), 0);
}

// A store that outlives its groups still holds the reports of an earlier group of this name.
TEST(WatchedGroup, SameNameAgain_HasAnotherNameThanBeforeAndTheSameOnEveryRank) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::string earlier;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> kept;  // groups are identified by address
  for (int time = 0; time < 2; ++time) {
    const auto groups = make_stored_groups(2, "again", store);
    const std::string name = watched(*groups[0])->key(*store, "status");
    EXPECT_EQ(watched(*groups[1])->key(*store, "status"), name);
    EXPECT_NE(name, earlier);
    earlier = name;
    kept.insert(kept.end(), groups.begin(), groups.end());
  }
}

// As when ranks are lost and replaced: ranks have created the group different numbers of times.
TEST(WatchedGroup, SameNameWithFewerRanksInBetween_IsTheSameOnEveryRank) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> names;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> kept;
  for (const int size : {3, 2, 3, 2}) {
    const auto groups = make_stored_groups(size, "again", store);
    const std::string name = watched(*groups[0])->key(*store, "status");
    for (const auto& group : groups) EXPECT_EQ(watched(*group)->key(*store, "status"), name);
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 0) << name;
    names.push_back(name);
    kept.insert(kept.end(), groups.begin(), groups.end());
  }
}

TEST(WatchedGroup, TwoJobsShareAStoreByPrefixes_NothingOfTheOtherIsRead) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>> jobs;
  for (const char* prefix : {"one", "other"})
    jobs.push_back(
        make_stored_groups(2, "group", c10::make_intrusive<c10d::PrefixStore>(prefix, store)));
  watched(*jobs[1][0]);
  const WatchedGroupPtr one = watched(*jobs[0][1]);
  read_processes(one).wait();
  EXPECT_TRUE(one->processes.empty());
  watched(*jobs[0][0]);
  read_processes(one).wait();
  EXPECT_EQ(one->processes.size(), 1U);
}

// Over NCCL a collective may return before other ranks have joined it.
TEST(WatchedGroup, ReadProcesses_AgainFindsThoseWhoHaveToldSinceAndForgetsNobody) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const auto groups = make_stored_groups(3, "late");
  const WatchedGroupPtr one = watched(*groups[1]);
  watched(*groups[0]);
  read_processes(one).wait();
  EXPECT_EQ(one->processes.size(), 1U);
  one->processes[0].pid = -7;  // as when it was read
  watched(*groups[2]);
  read_processes(one).wait();
  ASSERT_EQ(one->processes.size(), 2U);
  EXPECT_EQ(one->processes[0].pid, -7);
}

TEST(WatchedGroup, ReadProcesses_OfAGroupThatWasMadeFromAnother_FindsThoseOfThat) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto parents = make_stored_groups(2, "parent", store);
  const auto own = make_stored_groups(2, "own", store);
  for (size_t rank = 0; rank < 2; ++rank) watch_with(*own[rank], *parents[rank], "own");
  const WatchedGroupPtr one = find_watched(*own[1]);
  ASSERT_TRUE(one && one->parent);
  read_processes(one).wait();
  ASSERT_EQ(one->processes.size(), 1U);
  EXPECT_EQ(one->processes.at(0).encode(), this_process()->encode());
}

TEST(WatchedGroup, ProcessesThatAreNoneOrOnAnotherHost_HaveNotEnded) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(6, "odd", store);
  const WatchedGroupPtr one = watched(*groups[1]);
  const NoticeBoard board(one->key(*store, "process/" + this_process()->host));
  board.post(*store, "0", "rubbish");
  board.post(*store, "2", "");
  board.post(*store, "3", "0 0 " + this_process()->host);
  board.post(*store, "4", ProcessName{"another", 1, 1}.encode());
  board.post(*store, "5", ProcessName{"another", 1 << 30, 1}.encode());
  read_processes(one).wait();
  EXPECT_EQ(one->processes.size(), 3U);
  EXPECT_TRUE(look_around(*one).empty());
  one->processes[0] = *this_process();
  one->processes[0].start_time -= 1;  // the process id is reused
  EXPECT_EQ(look_around(*one).count(0), 1U);
}

/// NCCL only, with the ranks of the job that torch passes to it.
class Nccl final : public apex::testing::SilentBackend {
 public:
  Nccl(int rank, int size, std::vector<uint64_t> ranks, bool has_options)
      : SilentBackend(rank, size), has_options_(has_options) {
    options_->global_ranks_in_group = std::move(ranks);
  }
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return has_options_ ? options_ : Backend::getBackendOptions();
  }

 private:
  const bool has_options_;
  const c10::intrusive_ptr<Options> options_ = c10::make_intrusive<Options>("nccl");
};

TEST(WatchedGroup, NoteOnRanks_IsAlsoGivenOverNccl) {
  const auto note = [](std::vector<uint64_t> ranks, bool has_options = true) {
    const auto group =
        c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
    group->setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL,
                      c10::intrusive_ptr<c10d::Backend>(
                          c10::make_intrusive<Nccl>(0, 2, std::move(ranks), has_options)));
    return note_on_ranks(*group);
  };
  EXPECT_EQ(note({3, 5}),
            "; these are ranks within the group, which consists of ranks 3, 5 of the job");
  EXPECT_EQ(note({0, 1}), "");
  EXPECT_EQ(note({}), "");
  EXPECT_EQ(note({3, 5}, /*has_options=*/false), "");
}

TEST(WatchedGroup, ReadProcesses_FindsThoseOfTheOthersWhoHaveTold) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const auto groups = make_stored_groups(4, "read");
  const WatchedGroupPtr one = watched(*groups[1]);
  watched(*groups[0]);
  watched(*groups[3]);
  remember_processes(*groups[1]);
  ASSERT_EQ(one->processes.size(), 2U);
  EXPECT_EQ(one->processes.at(0).encode(), this_process()->encode());
  EXPECT_EQ(one->processes.at(3).encode(), this_process()->encode());
}

}  // namespace
}  // namespace apex::parallel
