// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Memory shared between processes of one host.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace apex::parallel {

// Note [Memory between processes]
//
// A block is an anonymous file (memfd_create) that its owner maps. Peers open it through
// /proc/PID/fd and map it as well. It has no name and is not subject to the limit of a mount. It is
// freed with the last process that maps it, however that process ends. The kernel refuses access to
// processes that may not trace the owner, so other users have none. Its size is sealed: if the
// owner could shrink the file, peers would fault.
//
// Blocks are larger than requested, since untouched pages cost nothing, and live as long as the
// HostMemory: freed memory is reused for the next bucket. Peers map a block on first use. They map
// the first block in the handshake, so that it stays readable after its owner has exited.

/// Location of data in a process, for its peers. Trivially copyable, since it is written into
/// shared memory.
struct HostPlace {
  int32_t fd = -1;     ///< the owner's file descriptor of the block
  uint32_t block = 0;  ///< index of the block in its owner
  uint64_t bytes = 0;  ///< size of the block
  uint64_t offset = 0;
};

/// The shared memory blocks of this process. Thread safe.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  /// Creates a first block of `first_bytes`, zeroed.
  /// @throws Error if the system refuses.
  static std::shared_ptr<HostMemory> create(size_t first_bytes);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  /// Start of the first block; allocate() returns nothing below `reserved`.
  char* first() const { return first_; }
  HostPlace first_place() const;
  void reserve(size_t reserved);

  /// Allocates `bytes`, aligned to 64, not initialized; freed with the last pointer, which keeps
  /// this object alive.
  /// @param in_first  only from the first block; null if that is full.
  /// @throws Error if the system has no memory.
  std::shared_ptr<char> allocate(size_t bytes, bool in_first = false);
  /// The same, zeroed. Memory that was never used is zero, and takes no pages until it is written.
  std::shared_ptr<char> allocate_zeroed(size_t bytes);

  /// Location of `data` for peers; nullopt if it is outside of this memory.
  std::optional<HostPlace> place_of(const void* data, size_t bytes) const;

  /// The same memory in this process, for ranks that are threads.
  void* at(const HostPlace& place) const;

 private:
  struct Block {
    int fd = -1;
    char* data = nullptr;
    size_t bytes = 0;
    std::map<size_t, size_t> free;  ///< offset to length, merged
    size_t used = 0;                ///< offsets from here on were never used
  };
  struct Taken {
    char* data = nullptr;
    size_t dirty = 0;  ///< leading bytes that may not be zero
  };
  HostMemory() = default;
  void add_block(size_t bytes);
  Taken take(Block& block, size_t bytes);
  Taken take_anywhere(size_t bytes);
  std::shared_ptr<char> owned(char* data, size_t bytes);
  void give_back(char* data, size_t bytes);
  HostPlace place_in(size_t block, size_t offset) const;

  char* first_ = nullptr;
  mutable std::mutex mutex_;  ///< guards blocks_
  std::vector<Block> blocks_;
};

/// The mappings of a peer's blocks. Not thread safe.
class PeerMemory {
 public:
  /// Of another process.
  explicit PeerMemory(int64_t pid) : pid_(pid) {}
  /// For another rank in this process, which has the same addresses.
  explicit PeerMemory(std::shared_ptr<HostMemory> same) : same_(std::move(same)) {}
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Address of `place` in this process; maps its block on first use.
  /// @throws Error if the block cannot be opened or does not match the owner's description.
  char* at(const HostPlace& place);

 private:
  struct Mapping {
    char* data = nullptr;
    size_t bytes = 0;
  };
  int64_t pid_ = 0;
  std::shared_ptr<HostMemory> same_;
  std::map<uint32_t, Mapping> mapped_;
};

}  // namespace apex::parallel
