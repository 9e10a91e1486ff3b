#include <gtest/gtest.h>

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "batch_norm/cpu_memory_cache.h"

namespace apex::parallel {
namespace {

constexpr size_t kMib = size_t{1} << 20;

TEST(CpuMemoryCache, Freed_SameSizeAgain_IsHandedOutAgain) {
  CpuMemoryCache cache(16 * kMib);
  void* first = cache.allocate(kMib);
  void* second = cache.allocate(kMib);
  EXPECT_NE(first, second);
  EXPECT_EQ(cache.idle_bytes(), 0u);
  cache.free(first);
  cache.free(second);
  EXPECT_EQ(cache.idle_bytes(), 2 * kMib);
  EXPECT_EQ(cache.allocate(kMib), second);  // the newest: the processor's caches may still know it
  EXPECT_EQ(cache.allocate(kMib), first);
  EXPECT_EQ(cache.idle_bytes(), 0u);
  cache.free(first);
  cache.free(second);
}

TEST(CpuMemoryCache, AnotherSize_SmallestThatWastesLittle_IsTaken) {
  CpuMemoryCache cache(64 * kMib);
  void* small = cache.allocate(8 * kMib);
  void* large = cache.allocate(9 * kMib);
  cache.free(small);
  cache.free(large);
  void* larger_request = cache.allocate(9 * kMib + 1);
  EXPECT_NE(larger_request, large);
  void* smaller_request =
      cache.allocate(7 * kMib);  // 8 MiB waste more than an eighth of it, 9 still more
  EXPECT_NE(smaller_request, small);
  EXPECT_NE(smaller_request, large);
  void* fits_both = cache.allocate(8 * kMib - 64);
  EXPECT_EQ(fits_both, small);
  void* fits_large = cache.allocate(8 * kMib);
  EXPECT_EQ(fits_large, large);
  // What was handed out for less is still known by its own size.
  cache.free(fits_large);
  EXPECT_EQ(cache.idle_bytes(), 9 * kMib);
  for (void* data : {larger_request, smaller_request, fits_both}) cache.free(data);
}

TEST(CpuMemoryCache, Limit_Exceeded_OldestGoFirst) {
  CpuMemoryCache cache(3 * kMib);
  void* oldest = cache.allocate(kMib);
  void* newer = cache.allocate(kMib);
  void* newest = cache.allocate(2 * kMib);
  void* too_large = cache.allocate(3 * kMib + 1);
  for (void* data : {oldest, newer, newest}) cache.free(data);
  EXPECT_EQ(cache.idle_bytes(), 3 * kMib);
  EXPECT_EQ(cache.allocate(kMib), newer);
  cache.free(newer);
  cache.free(too_large);
  EXPECT_EQ(cache.idle_bytes(), 3 * kMib);
  EXPECT_TRUE(cache.release());
  EXPECT_FALSE(cache.release());
  EXPECT_EQ(cache.idle_bytes(), 0u);
}

TEST(CpuMemoryCache, ManyBlocks_NumberIsLimitedToo) {
  CpuMemoryCache cache(size_t{1} << 30);
  std::vector<void*> blocks;
  for (size_t i = 0; i < CpuMemoryCache::kMaxBlocks + 5; ++i) {
    blocks.push_back(cache.allocate(CpuMemoryCache::kLeastBytes));
  }
  for (void* data : blocks) cache.free(data);
  EXPECT_EQ(cache.idle_bytes(), CpuMemoryCache::kMaxBlocks * CpuMemoryCache::kLeastBytes);
}

TEST(CpuMemoryCache, SmallOrNoLimit_NothingIsKept) {
  CpuMemoryCache cache(kMib), off(0);
  cache.free(cache.allocate(CpuMemoryCache::kLeastBytes - 1));
  EXPECT_EQ(cache.idle_bytes(), 0u);
  EXPECT_EQ(cache.allocate(0), nullptr);
  cache.free(nullptr);
  off.free(off.allocate(kMib));
  EXPECT_EQ(off.idle_bytes(), 0u);
}

TEST(CpuMemoryCache, EverySize_IsAlignedAndWritable) {
  CpuMemoryCache cache(64 * kMib);
  for (const size_t bytes : {size_t{1}, size_t{63}, CpuMemoryCache::kLeastBytes, 5 * kMib + 3}) {
    for (int again = 0; again < 2; ++again) {
      void* data = cache.allocate(bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % CpuMemoryCache::kAlignment, 0u);
      std::memset(data, 0x5a, bytes);
      cache.free(data);
    }
  }
}

TEST(CpuMemoryCache, MoreThanThereIs_ThrowsAndGivesBackWhatItKept) {
  CpuMemoryCache cache(4 * kMib);
  cache.free(cache.allocate(kMib));
  EXPECT_THROW(cache.allocate(SIZE_MAX / 2), c10::Error);
  EXPECT_EQ(cache.idle_bytes(), 0u);
  EXPECT_THROW(cache.allocate(SIZE_MAX), c10::Error);
}

TEST(CpuMemoryCache, Threads_EachBlockHasOneOwner) {
  CpuMemoryCache cache(4 * kMib);
  std::atomic<int> mixed_up{0};
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (int turn = 0; turn < 2000; ++turn) {
        const size_t bytes = CpuMemoryCache::kLeastBytes + static_cast<size_t>(turn % 3) * 64;
        auto* data = static_cast<volatile int*>(cache.allocate(bytes));
        data[0] = id;
        data[bytes / sizeof(int) - 1] = id;
        if (turn % 16 == 0) std::this_thread::yield();
        if (data[0] != id || data[bytes / sizeof(int) - 1] != id) ++mixed_up;
        cache.free(const_cast<int*>(data));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mixed_up, 0);
}

/// What c10 calls to copy a storage that is shared until it is written.
TEST(CpuCacheAllocator, CopyData_CopiesEveryByte) {
  c10::Allocator* const allocator = cpu_cache_allocator();
  const c10::DataPtr first = allocator->allocate(kMib);
  std::memset(first.get(), 0x5a, kMib);
  const c10::DataPtr second = allocator->allocate(kMib);
  std::memset(second.get(), 0, kMib);
  allocator->copy_data(second.get(), first.get(), kMib);
  EXPECT_EQ(std::memcmp(first.get(), second.get(), kMib), 0);
}

TEST(CpuCacheLimit, Environment_IsMibOrAnErrorThatSaysHow) {
  EXPECT_EQ(cpu_cache_limit_bytes(nullptr), 128 * kMib);
  EXPECT_EQ(cpu_cache_limit_bytes("0"), 0u);
  EXPECT_EQ(cpu_cache_limit_bytes("512"), 512 * kMib);
  for (const char* wrong : {"", "-1", "1.5", "64M", " 64", "99999999999999999999", "16777217"}) {
    try {
      cpu_cache_limit_bytes(wrong);
      ADD_FAILURE() << "'" << wrong << "' was taken";
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find("APEX_CPU_CACHE_MIB"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace apex::parallel
