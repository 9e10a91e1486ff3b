// SPDX-License-Identifier: BSD-3-Clause
#include "watch/notice_board.h"

#include <support/counting_store.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace apex::parallel {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Texts = std::map<std::string, std::string>;

/// One store of each kind; a file store has no append().
std::vector<StorePtr> stores() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const StorePtr server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const std::string file = ::testing::TempDir() + "apex_notice_board_test";
  std::remove(file.c_str());
  return {c10::make_intrusive<c10d::HashStore>(), server,
          c10::make_intrusive<c10d::PrefixStore>("a", server),
          c10::make_intrusive<c10d::FileStore>(file, 1)};
}

TEST(NoticeBoard, TextsOfAuthors_AreReadAsTheyWerePostedLast) {
  for (const StorePtr& store : stores()) {
    const NoticeBoard board("test");
    EXPECT_EQ(board.posts(*store), 0);
    EXPECT_EQ(board.read(*store), Texts{});
    board.post(*store, "12 of a", "two\nlines, 3 4\n");
    board.post(*store, "0", "");
    board.post(*store, "3", "replaced");
    board.post(*store, "3", "by this");
    EXPECT_EQ(board.posts(*store), 4);
    EXPECT_EQ(board.read(*store),
              (Texts{{"0", ""}, {"3", "by this"}, {"12 of a", "two\nlines, 3 4\n"}}));
    EXPECT_EQ(NoticeBoard("another").read(*store), Texts{});
  }
}

// A FileStore keeps a record of every call of add(), and waiting ranks look at the board often.
TEST(NoticeBoard, LookedAt_NothingIsAddedToAFileStore) {
  const std::string file = ::testing::TempDir() + "apex_notice_board_looks";
  std::remove(file.c_str());
  const auto store = c10::make_intrusive<c10d::FileStore>(file, 1);
  const NoticeBoard board("test");
  board.post(*store, "1", "a");
  const auto before = std::filesystem::file_size(file);
  for (int look = 0; look < 3; ++look) board.read(*store);
  EXPECT_EQ(board.posts(*store), 1);
  EXPECT_EQ(count_of(*store, "unset"), 0);
  EXPECT_EQ(std::filesystem::file_size(file), before);
}

// A wrong length must not make the reader loop.
TEST(NoticeBoard, EntryOfAWrongLength_EndsWhatIsRead) {
  for (const std::string wrong : {"-6 3 \n", "-1 3 \nabc", "99 3 \nabc", "9", "\n\n 5 ", "x y"}) {
    c10d::HashStore store;
    const NoticeBoard board("test");
    board.post(store, "1", "before");
    store.append("test", {wrong.begin(), wrong.end()});
    const Texts texts = board.read(store);
    ASSERT_EQ(texts.count("1"), 1U) << wrong;
    EXPECT_EQ(texts.at("1"), "before") << wrong;
  }
}

TEST(NoticeBoard, RanksPostAtOnce_NoneIsLost) {
  for (const StorePtr& store : stores()) {
    const NoticeBoard board("test");
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 8; ++rank) {
      ranks.emplace_back([&board, &store, rank] {
        for (int time = 0; time < 5; ++time)
          board.post(*store, std::to_string(rank), std::to_string(time));
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(board.posts(*store), 40);
    const Texts texts = board.read(*store);
    ASSERT_EQ(texts.size(), 8U);
    for (const auto& [rank, text] : texts) EXPECT_EQ(text, "4") << rank;
  }
}

// Polling the posts of a thousand ranks is one request, and reading takes two more.
TEST(NoticeBoard, ManyRanks_AreReadInAFewRequests) {
  const auto store = c10::make_intrusive<apex::testing::CountingStore>();
  const NoticeBoard board("test");
  for (int rank = 0; rank < 1000; ++rank) board.post(*store, std::to_string(rank), "lost");
  const int64_t before = store->requests();
  EXPECT_EQ(board.posts(*store), 1000);
  EXPECT_EQ(board.read(*store).size(), 1000U);
  EXPECT_LE(store->requests() - before, 3);
}

}  // namespace
}  // namespace apex::parallel
