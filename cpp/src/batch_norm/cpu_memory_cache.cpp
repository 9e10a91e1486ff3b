#include "batch_norm/cpu_memory_cache.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace apex::parallel {
namespace {

constexpr size_t kDefaultLimitMib = 128;
constexpr size_t kMaxLimitMib = size_t{1} << 24;

// In front of what allocate() returns lies its size, in as many bytes as keep the alignment.
constexpr size_t kHeaderBytes = CpuMemoryCache::kAlignment;

size_t size_of(const void* data) {
  size_t bytes = 0;
  std::memcpy(&bytes, static_cast<const char*>(data) - kHeaderBytes, sizeof(bytes));
  return bytes;
}

/// Pages of 4 KiB cost more to meet than arithmetic on them: ask for huge ones. A hint only.
void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr size_t kLarge = size_t{4} << 20;
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  if (bytes >= kLarge) {
    const auto start = reinterpret_cast<uintptr_t>(data);
    const uintptr_t first = (start + kHugePage - 1) & ~(kHugePage - 1);
    const uintptr_t last = (start + bytes) & ~(kHugePage - 1);
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
}

void* allocate_block(size_t bytes) {
  TORCH_CHECK(bytes <= SIZE_MAX - kHeaderBytes, "apex: a result of ", bytes,
              " bytes does not fit into memory.");
  char* block = static_cast<char*>(c10::alloc_cpu(bytes + kHeaderBytes));
  prefer_huge_pages(block, bytes + kHeaderBytes);
  std::memcpy(block, &bytes, sizeof(bytes));
  return block + kHeaderBytes;
}

void free_block(void* data) { c10::free_cpu(static_cast<char*>(data) - kHeaderBytes); }

/// Of the process. Never destroyed: tensors may outlive every static object.
CpuMemoryCache& shared_cache() {
  static auto* cache = new CpuMemoryCache(cpu_cache_limit_bytes(std::getenv("APEX_CPU_CACHE_MIB")));
  return *cache;
}

void free_shared(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  shared_cache().free(data);
}

struct CpuCacheAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = shared_cache().allocate(bytes);
    if (data != nullptr) c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &free_shared, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_shared; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

}  // namespace

void* CpuMemoryCache::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  if (void* kept = take(bytes)) return kept;
  try {
    return allocate_block(bytes);
  } catch (const c10::Error&) {
    if (!release()) throw;
  }
  return allocate_block(bytes);
}

void CpuMemoryCache::free(void* data) noexcept {
  if (data != nullptr && !keep({data, size_of(data)})) free_block(data);
}

bool CpuMemoryCache::release() noexcept {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || idle_count_ == 0) return false;
  while (idle_count_ > 0) drop_oldest();
  return true;
}

size_t CpuMemoryCache::idle_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return idle_bytes_;
}

/// The newest of the smallest blocks that are large enough and waste no more than an eighth.
void* CpuMemoryCache::take(size_t bytes) {
  if (bytes < kLeastBytes) return nullptr;
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return nullptr;
  Block* const end = idle_.data() + idle_count_;
  Block* best = end;
  for (Block* block = end; block-- != idle_.data();) {
    if (block->bytes >= bytes && block->bytes - bytes <= bytes / 8 &&
        (best == end || block->bytes < best->bytes)) {
      best = block;
    }
  }
  if (best == end) return nullptr;
  void* data = best->data;
  idle_bytes_ -= best->bytes;
  std::copy(best + 1, end, best);
  --idle_count_;
  return data;
}

bool CpuMemoryCache::keep(const Block& block) noexcept {
  if (block.bytes < kLeastBytes || block.bytes > limit_bytes_) return false;
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  while (idle_count_ == kMaxBlocks || idle_bytes_ + block.bytes > limit_bytes_) drop_oldest();
  idle_[idle_count_++] = block;
  idle_bytes_ += block.bytes;
  return true;
}

void CpuMemoryCache::drop_oldest() noexcept {
  free_block(idle_[0].data);
  idle_bytes_ -= idle_[0].bytes;
  std::copy(idle_.begin() + 1, idle_.begin() + idle_count_, idle_.begin());
  --idle_count_;
}

size_t cpu_cache_limit_bytes(const char* value) {
  size_t mib = kDefaultLimitMib;
  if (value != nullptr) {
    const char* const end = value + std::strlen(value);
    const auto [parsed, error] = std::from_chars(value, end, mib);
    TORCH_CHECK_VALUE(parsed == end && error == std::errc{} && mib <= kMaxLimitMib,
                      "APEX_CPU_CACHE_MIB is '", value,
                      "'; set it to how many MiB of memory for results on the CPU to keep for ",
                      "reuse, from 0 (none) to ", kMaxLimitMib, ", or unset it.");
  }
  return mib << 20;
}

c10::Allocator* cpu_cache_allocator() {
  static auto* allocator = new CpuCacheAllocator;  // never destroyed, as the cache
  shared_cache();
  return allocator;
}

}  // namespace apex::parallel
