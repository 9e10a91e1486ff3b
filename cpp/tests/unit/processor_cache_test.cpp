// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "kernels/processor_cache.h"

namespace apex::kernels {
namespace {

/// A folder like Linux's description of a processor's caches.
class ProcessorCache : public testing::Test {
 protected:
  ProcessorCache() : folder_(testing::TempDir() + "/caches-" + std::to_string(::getpid())) {}
  ~ProcessorCache() override { std::filesystem::remove_all(folder_); }

  void add(const std::string& level, const std::string& size) {
    const std::string cache = folder_ + "/index" + std::to_string(caches_++);
    std::filesystem::create_directories(cache);
    if (!level.empty()) std::ofstream(cache + "/level") << level << '\n';
    if (!size.empty()) std::ofstream(cache + "/size") << size << '\n';
  }

  const std::string folder_;
  int caches_ = 0;
};

TEST_F(ProcessorCache, SeveralLevels_LastIsTaken) {
  add("1", "32K");
  add("1", "48K");
  add("2", "1024K");
  EXPECT_EQ(last_cache_bytes(folder_), size_t{1} << 20);
  add("3", "32M");
  EXPECT_EQ(last_cache_bytes(folder_), size_t{32} << 20);
}

TEST_F(ProcessorCache, NothingOrNonsense_IsZeroOrLeftOut) {
  EXPECT_EQ(last_cache_bytes(folder_), 0u);
  add("2", "512K");
  add("3", "");
  EXPECT_EQ(last_cache_bytes(folder_), size_t{512} << 10);
  add("4", "unknown");
  EXPECT_EQ(last_cache_bytes(folder_), size_t{512} << 10);
}

TEST(ProcessorCacheOfThisMachine, AnySystem_IsNotNone) {
  EXPECT_GE(last_cache_bytes(), size_t{64} << 10);
  EXPECT_EQ(last_cache_bytes(), last_cache_bytes());
}

}  // namespace
}  // namespace apex::kernels
