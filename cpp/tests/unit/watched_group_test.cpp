// SPDX-License-Identifier: BSD-3-Clause
#include "watch/watched_group.h"

#include <support/stored_group.h>
#include <support/stream_mark.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "distributed/backends.h"

namespace apex::distributed {

// The library's ask Gloo, which is not compiled into this program.
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

std::unique_ptr<StreamMark> make_stream_mark() { return testing::make_stream_mark(); }

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

TEST(WatchedGroup, OneRank_HasNobodyToTell) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(watched(*make_stored_groups(1, "alone", store)[0]), nullptr);
  EXPECT_EQ(store->getNumKeys(), 0);
}

// A store that outlives its groups holds what an earlier one of this name has reported.
TEST(WatchedGroup, SameNameAgain_HasAnotherNameThanBeforeAndTheSameOnEveryRank) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::string earlier;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> kept;  // a group is known by its address
  for (int time = 0; time < 2; ++time) {
    const auto groups = make_stored_groups(2, "again", store);
    const std::string name = watched(*groups[0])->key(*store, "status");
    EXPECT_EQ(watched(*groups[1])->key(*store, "status"), name);
    EXPECT_NE(name, earlier);
    earlier = name;
    kept.insert(kept.end(), groups.begin(), groups.end());
  }
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
