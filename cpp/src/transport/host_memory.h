// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Memory shared between processes of one host.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace apex::parallel {

// Note [Memory between processes]
//
// The memory of a rank is one anonymous file (memfd_create) that its owner maps. Peers open it
// through /proc/PID/fd when they connect and map it as well, so it stays readable after its owner
// has exited. It has no name and is not subject to the limit of a mount. It is freed with the last
// process that maps it, however that process ends. The kernel refuses access to processes that may
// not trace the owner, so other users have none. Its size is sealed: if the owner could shrink the
// file, peers would fault. A random number in it tells peers that they have opened the right file.
//
// It is far larger than requests, since untouched pages cost nothing. Freed memory is reused for
// the next bucket.

/// How peers open the memory of a rank. Trivially copyable.
struct HostFile {
  int32_t fd = -1;  ///< the owner's file descriptor
  uint64_t bytes = 0;
  uint64_t number = 0;  ///< the random number in it
};

/// Offset in a rank's memory of the bytes that HostMemory::create() reserves.
constexpr size_t kReservedAt = 64;

/// The shared memory of this rank. Thread safe.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  /// Zeroed.
  /// @param reserved  bytes at kReservedAt that allocate() does not use.
  /// @throws Error if the system refuses.
  static std::shared_ptr<HostMemory> create(size_t bytes, size_t reserved);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  HostFile file() const { return file_; }
  char* data() const { return data_; }

  /// Allocates `bytes`, aligned to 64, not initialized; freed with the last pointer, which keeps
  /// this object alive.
  /// @throws Error if it is full.
  std::shared_ptr<char> allocate(size_t bytes) { return allocate(bytes, /*zeroed=*/false); }
  /// The same, zeroed. Memory that was never used is zero, and takes no pages until it is written.
  std::shared_ptr<char> allocate_zeroed(size_t bytes) { return allocate(bytes, /*zeroed=*/true); }

  /// Offset of `bytes` bytes at `data`; nullopt if they are outside of this memory.
  std::optional<uint64_t> offset_of(const void* data, size_t bytes) const;

 private:
  HostMemory(const HostFile& file, char* data) : file_(file), data_(data) {}
  std::shared_ptr<char> allocate(size_t bytes, bool zeroed);
  void give_back(char* data, size_t bytes);

  const HostFile file_;
  char* const data_;
  std::mutex mutex_;               ///< guards what follows
  std::map<size_t, size_t> free_;  ///< offset to length, merged
  size_t used_ = 0;                ///< offsets from here on were never used
};

/// The memory of another rank.
class PeerMemory {
 public:
  /// Maps the memory of another process.
  /// @throws Error if it cannot be opened, or is not what its owner describes.
  PeerMemory(int64_t pid, const HostFile& file);
  /// For another rank in this process.
  explicit PeerMemory(std::shared_ptr<HostMemory> same)
      : same_(std::move(same)), data_(same_->data()) {}
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  char* data() const { return data_; }

 private:
  const std::shared_ptr<HostMemory> same_;
  size_t bytes_ = 0;
  char* data_ = nullptr;
};

}  // namespace apex::parallel
