// SPDX-License-Identifier: BSD-3-Clause
#include "comm/group_record.h"

#include <support/stored_group.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

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

}  // namespace apex::distributed

namespace apex::parallel {
namespace {

using apex::testing::make_stored_groups;

TEST(GroupRecord, FirstAskedFor_TellsTheOthersWhichProcessThisIs) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(2, "told", store);
  const GroupRecordPtr one = record_of(*groups[1]);
  ASSERT_TRUE(one);
  EXPECT_EQ(one->rank, 1);
  EXPECT_EQ(one->size, 2);
  const std::map<int, std::string> told{{1, this_process()->encode()}};
  EXPECT_EQ(one->process_board(this_process()->host).read(*store), told);
  EXPECT_EQ(record_of(*groups[1]), one);
  EXPECT_EQ(find_record(*groups[1]), one);
  EXPECT_EQ(find_record(*groups[0]), nullptr);
}

TEST(GroupRecord, OneRank_HasNobodyToTell) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(record_of(*make_stored_groups(1, "alone", store)[0]), nullptr);
  EXPECT_EQ(store->getNumKeys(), 0);
}

// A store that outlives its groups holds what an earlier one of this name has reported.
TEST(GroupRecord, SameNameAgain_HasOtherKeysThanBeforeAndTheSameOnEveryRank) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::string earlier;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> kept;  // a group is known by its address
  for (int time = 0; time < 2; ++time) {
    const auto groups = make_stored_groups(2, "again", store);
    const std::string key = record_of(*groups[0])->count_key();
    EXPECT_EQ(record_of(*groups[1])->count_key(), key);
    EXPECT_NE(key, earlier);
    earlier = key;
    kept.insert(kept.end(), groups.begin(), groups.end());
  }
}

TEST(GroupRecord, ReadProcesses_FindsThoseOfTheOthersWhoHaveTold) {
  if (!this_process()) GTEST_SKIP() << "no /proc";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto groups = make_stored_groups(4, "read", store);
  const GroupRecordPtr one = record_of(*groups[1]);
  record_of(*groups[0]);
  record_of(*groups[3]);
  read_processes(*store, *one);
  ASSERT_EQ(one->processes.size(), 2U);
  EXPECT_EQ(one->processes.at(0).encode(), this_process()->encode());
  EXPECT_EQ(one->processes.at(3).encode(), this_process()->encode());
}

// A call that blocks in a connection would keep the user's own calls waiting.
TEST(GroupRecord, OwnConnection_ToAServer_IsAnotherOne) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const StorePtr server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const StorePtr prefixed = c10::make_intrusive<c10d::PrefixStore>("a", server);
  for (const StorePtr& store : {server, prefixed}) {
    const StorePtr own = own_connection(store);
    EXPECT_NE(own, store);
    store->set("key", "value");
    EXPECT_EQ(own->get_to_str("key"), "value");
  }
}

// A file is removed when as many stores on it have ended as there are ranks.
TEST(GroupRecord, OwnConnection_ToAFile_IsTheSame) {
  const std::string path = ::testing::TempDir() + "apex_group_record_test";
  const StorePtr file = c10::make_intrusive<c10d::FileStore>(path, 1);
  EXPECT_EQ(own_connection(file), file);
}

}  // namespace
}  // namespace apex::parallel
