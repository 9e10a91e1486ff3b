#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <cstddef>
#include <mutex>

namespace apex::parallel {

/// Memory on the CPU that is kept when it is freed, for the next request of about its size.
///
/// A C library gives large blocks back to the system, which hands out new pages, zeroed, when they
/// are first written: more work than a batch norm does with them. Thread safe; does not wait for
/// other threads, whose concurrent requests are served without the cache (and so is a forked child,
/// should the lock have been held).
class CpuMemoryCache {
 public:
  /// Smaller blocks are left to the C library, which keeps them.
  static constexpr size_t kLeastBytes = size_t{128} << 10;
  static constexpr size_t kMaxBlocks = 256;
  static constexpr size_t kAlignment = 64;

  /// Keeps at most so many bytes that nobody uses; 0 keeps none.
  explicit CpuMemoryCache(size_t limit_bytes) : limit_bytes_(limit_bytes) {}
  ~CpuMemoryCache() { release(); }
  CpuMemoryCache(const CpuMemoryCache&) = delete;
  CpuMemoryCache& operator=(const CpuMemoryCache&) = delete;

  /// Uninitialized, aligned to kAlignment; null for 0 bytes. Gives back what it keeps rather than
  /// fail.
  /// @throws c10::Error if there is not so much memory.
  void* allocate(size_t bytes);
  /// Of what allocate() of this cache returned; nothing for null.
  void free(void* data) noexcept;

  /// Gives back what nobody uses; says whether there was any.
  bool release() noexcept;
  size_t idle_bytes() const;

 private:
  struct Block {
    void* data;
    size_t bytes;
  };

  void* take(size_t bytes);
  bool keep(const Block& block) noexcept;
  void drop_oldest() noexcept;

  const size_t limit_bytes_;
  mutable std::mutex mutex_;
  std::array<Block, kMaxBlocks> idle_;  ///< the first idle_count_, oldest first
  size_t idle_count_ = 0;
  size_t idle_bytes_ = 0;
};

/// The limit that the environment variable APEX_CPU_CACHE_MIB asks for; `value` may be null.
/// @throws c10::ValueError (a ValueError in Python) unless it is a number of MiB.
size_t cpu_cache_limit_bytes(const char* value);

/// Allocator of a cache that the process shares, with cpu_cache_limit_bytes() of its environment.
/// What it hands out shows in torch's memory profile as torch's own allocations do.
/// @throws as cpu_cache_limit_bytes(), in every call.
c10::Allocator* cpu_cache_allocator();

}  // namespace apex::parallel
